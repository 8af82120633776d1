"""What the ranks of the multi-rank tests run: small models, replicated or sharded, saved and restored together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from reprieve import Checkpointer
from reprieve.testing import disk


class Odd(nn.Module):
    """Shapes that no number of ranks divides evenly, a tied weight, and a layer with fewer rows than ranks."""

    def __init__(self, wide: int = 31) -> None:
        super().__init__()
        self.first = nn.Linear(wide, 17)
        self.second = nn.Linear(17, 3)
        self.embed = nn.Embedding(17, 23)
        self.head = nn.Linear(23, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden).square().mean() + self.head(hidden[:, :17] @ self.embed.weight).square().mean()


class Large(nn.Module):
    """Files of several megabytes: every rank has pieces to write, and zip records cross from one rank to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(31, 30011)
        self.second = nn.Linear(30011, 37)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


class Normed(nn.Module):
    """With buffers that differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(31, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, generator: torch.Generator) -> None:
    for _ in range(count):
        loss = model(torch.randn(5, 31, generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def data_of(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + rank)


def whole(tree: Any) -> Any:
    """A copy with every tensor gathered."""
    if isinstance(tree, DTensor):
        return tree.full_tensor().detach().clone()
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(whole(value) for value in tree)
    return tree


def replicated(kind: Callable[[], nn.Module] = Odd, seed: int = 0, **ddp: Any) -> nn.Module:
    torch.manual_seed(seed)
    return DistributedDataParallel(kind(), **ddp)


def sharded(kind: Callable[[], nn.Module] = Odd, seed: int = 0, mesh: Any = None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = kind()
    fully_shard(model, **({"mesh": mesh} if mesh is not None else {}))
    assert all(isinstance(param, DTensor) for param in model.parameters())
    return model


def checkpointer(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Checkpointer:
    state = {"model": model, "optimizer": optimizer}
    return Checkpointer(
        root, name="r", disk=disk(), rank_timeout=settings.pop("rank_timeout", "20s"), **state, **settings
    )


def save_ddp(root: Path, background: bool = False, kind: type[nn.Module] = Odd) -> Any:
    """Train, save, and say what was saved, gathered."""
    model = replicated(kind)
    optimizer = adamw(model)
    data = data_of(dist.get_rank())
    with checkpointer(root, model, optimizer, data=data, mine={"rank": dist.get_rank()}) as saver:
        steps(model, optimizer, 2, data)
        saver.save(2, background=background, values={"from": dist.get_rank()}).wait()
        return whole(model.module.state_dict()), whole(optimizer.state_dict()), data.get_state()


def restore_ddp(root: Path, kind: type[nn.Module] = Odd) -> Any:
    model = replicated(kind, seed=7)
    optimizer = adamw(model)
    data, mine = data_of(99), {"rank": -1}
    with checkpointer(root, model, optimizer, data=data, mine=mine) as saver:
        found = saver.restore()
        assert found is not None
        return (whole(model.module.state_dict()), whole(optimizer.state_dict()), data.get_state(),
                mine["rank"], found.values["from"], found.step)  # fmt: skip


def save_fsdp(
    root: Path, background: bool = False, mesh_shape: tuple[int, ...] | None = None, kind: type[nn.Module] = Odd
) -> Any:
    model = sharded(kind, mesh=_mesh(mesh_shape))
    optimizer = adamw(model)
    with checkpointer(root, model, optimizer) as saver:
        steps(model, optimizer, 2, data_of(dist.get_rank()))
        saver.save(2, background=background).wait()
        return whole(model.state_dict()), whole(optimizer.state_dict())


def restore_fsdp(root: Path, mesh_shape: tuple[int, ...] | None = None, kind: type[nn.Module] = Odd) -> Any:
    model = sharded(kind, seed=7, mesh=_mesh(mesh_shape))
    optimizer = adamw(model)
    with checkpointer(root, model, optimizer) as saver:
        assert saver.restore() is not None
        assert all(isinstance(param, DTensor) for param in model.parameters())
        state = optimizer.state_dict()["state"]
        assert all(isinstance(one["exp_avg"], DTensor) for one in state.values())
        before = whole(model.state_dict()), whole(optimizer.state_dict())
        steps(model, optimizer, 1, data_of(dist.get_rank()))  # and training can go on
        return before


def restore_alone(root: Path, kind: type[nn.Module] = Odd) -> Any:
    model = kind()
    optimizer = adamw(model)
    with checkpointer(root, model, optimizer) as saver:
        assert saver.restore() is not None
        return whole(model.state_dict()), whole(optimizer.state_dict())


def save_by_time(root: Path) -> Any:
    """Steps of which some are slow on one rank; a save is due every 50 ms."""
    rank = dist.get_rank()
    model = replicated()
    optimizer = adamw(model)
    saved = []
    with checkpointer(root, model, optimizer, every="50ms", keep=None) as saver:
        for step in range(1, 101):
            steps(model, optimizer, 1, data_of(rank))
            if rank == 1 and step % 7 == 0:
                time.sleep(0.02)
            if saver.save_if_due(step) is not None:
                saved.append(step)
    return saved


def bytes_read(root: Path, mesh_shape: tuple[int, ...] | None = None, kind: type[nn.Module] = Large) -> int:
    """How much of the storage this rank reads for its part of a restore."""
    from reprieve.checkpoint.io import reader

    count = 0
    read_into = reader.read_into

    def counting(*args: Any) -> int:
        nonlocal count
        done = read_into(*args)
        count += done
        return done

    reader.read_into = counting
    reader.read_from_cache = lambda *_: False
    restore_fsdp(root, mesh_shape, kind)
    return count


def _mesh(shape: tuple[int, ...] | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
