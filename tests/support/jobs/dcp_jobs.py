"""What the rank processes of the DCP tests run: models on several meshes, saves, loads and faults."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reprieve.adapters.dcp import save_folder
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES
from reprieve.checkpoint.format.checksum import digest_of
from reprieve.dcp import StorageReader, StorageWriter
from reprieve.storage.disk import Disk, OpenFile

MESHES = {"fsdp": (-1,), "hsdp": (2, 2), "2d": (2, 2), "none": ()}


class Net(nn.Module):
    """A model with shapes that no number of ranks divides, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(31, 18)
        self.down = nn.Linear(18, 31)
        self.odd = nn.Linear(31, 17)
        self.head = nn.Linear(17, 2, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = self.head(self.odd(self.down(torch.relu(self.up(x)))))
        return out


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model on the mesh, and an optimizer that has done a step."""
    torch.manual_seed(seed)
    model = Net()
    if kind != "none":
        shape = tuple(dist.get_world_size() if size == -1 else size for size in MESHES[kind])
        if kind == "2d":
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
            parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            mesh = mesh["data"]
        else:
            names = ("replicas", "shards") if kind == "hsdp" else ("shards",)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for child in (model.up, model.odd, model):
            fully_shard(child, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed)
    model(torch.randn(4, 31)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found_model, found_optimizer = get_state_dict(model, optimizer)
    return {"model": found_model, "optimizer": found_optimizer, "step": 7, "note": "läuft", "betas": (0.9, 0.95)}


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, reader: Any) -> dict[str, Any]:
    state = state_of(model, optimizer)
    state["step"] = state["note"] = state["betas"] = None
    quietly(dcp.load, state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state_of(model, optimizer) | {key: state[key] for key in ("step", "note", "betas")}


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call without warnings: DCP warns if there is a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def local(tree: Any) -> Any:
    """Return what this rank holds, for comparisons."""
    if isinstance(tree, dict):
        return {key: local(value) for key, value in tree.items()}
    if isinstance(tree, DTensor):
        tree = tree.to_local()
    return bits(tree) if isinstance(tree, torch.Tensor) else tree


def whole(tree: Any) -> Any:
    """Return what all ranks together hold. A collective."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, DTensor):
        tree = tree.full_tensor()
    return bits(tree) if isinstance(tree, torch.Tensor) else tree


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = tensor.detach().resolve_conj().contiguous()
    raw = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), digest_of(raw)


# What the tests call


def together(calls: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Run several scenarios in the same processes: importing DTensor takes longer than all of them."""
    found: dict[str, Any] = {}
    for name, (function, *args) in calls.items():
        try:
            found[name] = function(*args)
        except Exception:  # noqa: BLE001 - the test of this scenario shows it
            found[name] = traceback.format_exc()
        dist.barrier()
    return found


def write_and_read_both_ways(top: Path, kind: str) -> dict[str, bool]:
    """Load Reprieve's checkpoint with stock DCP, and stock's and Reprieve's with Reprieve."""
    saved = state_of(*build(kind, seed=1))
    quietly(dcp.save, saved, storage_writer=StorageWriter(top / "ours"))
    quietly(dcp.save, saved, checkpoint_id=top / "stock")
    found = {}
    for name, reader in {
        "ours by stock": dcp.FileSystemReader(top / "ours"),
        "stock by ours": StorageReader(top / "stock"),
        "ours by ours": StorageReader(top / "ours"),
    }.items():
        other = build(kind, seed=2)
        assert local(state_of(*other)) != local(saved), "the load would change nothing"
        found[name] = local(restore(*other, reader)) == local(saved)
    return found


def write(path: Path, kind: str) -> Any:
    saved = state_of(*build(kind, seed=1))
    quietly(dcp.save, saved, storage_writer=StorageWriter(path))
    return whole(saved)


def read(top: Path, names: list[str], kind: str) -> dict[str, Any]:
    return {name: whole(restore(*build(kind, seed=2), StorageReader(top / name))) for name in names}


def plain(rank: int, number: int) -> dict[str, Any]:
    """Return a state without a model, to which each rank adds 3 blocks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(100 * number + rank)
    own = torch.randint(0, 256, (3, 2**24 + 5), generator=generator, dtype=torch.uint8)
    return {"own": DTensor.from_local(own, mesh, [Shard(0)]), "number": number}


def save_numbered(path: Path, number: int, disk: Disk | None = None) -> None:
    quietly(dcp.save, plain(dist.get_rank(), number), storage_writer=StorageWriter(path, disk=disk))
    save_folder.wait_for_removals()


def load_numbered(path: Path, reader: Any = None) -> int:
    """Load the checkpoint, assert that it is one of the numbered states, and return its number."""
    state = plain(dist.get_rank(), 0)
    quietly(dcp.load, state, storage_reader=reader or StorageReader(path))
    assert local(state) == local(plain(dist.get_rank(), state["number"]))
    number: int = state["number"]
    return number


def fail_then_load(path: Path, failing: int, disk: Callable[..., Disk], *args: Any) -> dict[str, Any]:
    """Overwrite a checkpoint with a save that fails on one rank, which has that disk; then load it."""
    save_numbered(path, 1)
    message = error_of(save_numbered, path, 2, disk(*args) if dist.get_rank() == failing else None)
    dist.barrier()
    loaded = load_numbered(path, dcp.FileSystemReader(path))
    return {"message": message, "names": sorted(os.listdir(path.parent)), "loaded": loaded}


def damage_then_load(path: Path) -> dict[str, str]:
    """Flip a bit of rank 1's file, then empty `.metadata`; return the errors of the loads."""
    save_numbered(path, 1)
    if dist.get_rank() == 0:
        flip(path / "__1_0.distcp", 8 * (2 * BLOCK_BYTES + 12345))
    dist.barrier()
    block = error_of(load_numbered, path)
    if dist.get_rank() == 0:
        (path / ".metadata").write_bytes(b"")
    dist.barrier()
    return {"block": block, "metadata": error_of(load_numbered, path)}


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def error_of(function: Any, *args: Any) -> str:
    """Return the message that DCP raised, with the errors of all ranks."""
    try:
        function(*args)
    except dcp.CheckpointException as error:
        return str(error)
    return "nothing was raised"


def save_and_die(path: Path, dying: int, at: str, nth: int) -> str:
    save_numbered(path, 1)
    disk = Dies(at, nth) if dist.get_rank() == dying else None
    try:
        save_numbered(path, 2, disk)
    except BaseException as error:  # noqa: BLE001 - an error of gloo or DCP
        return type(error).__name__
    return "saved"


def save_again(path: Path, number: int) -> tuple[list[str], int]:
    save_numbered(path, number)
    dist.barrier()
    return sorted(os.listdir(path.parent)), load_numbered(path)


def save_asynchronously(path: Path, kind: str) -> dict[str, int]:
    """Save in the background, and change the state as soon as async_save returns."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    state = plain(dist.get_rank(), 3)
    writer = StorageWriter(path)
    future = quietly(dcp.async_save, state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType(kind))
    state["own"].to_local().zero_()
    future.result()
    dist.barrier()
    return {"ours": load_numbered(path), "stock": load_numbered(path, dcp.FileSystemReader(path))}


class BreaksAtWrite(Disk):
    """A disk whose n-th write fails, and all after it."""

    def __init__(self, nth: int, code: int) -> None:
        self.remaining = nth
        self.code = code

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        self.remaining -= 1
        if self.remaining <= 0:
            raise OSError(self.code, os.strerror(self.code), str(file.path))
        super().write(file, data, offset)


class Dies(Disk):
    """A disk that kills the process before the n-th use of a verb, or before the n-th change of any kind."""

    VERBS = ("make_folder", "create", "write", "truncate", "flush", "flush_folder", "rename", "remove", "remove_folder")

    def __init__(self, verb: str, nth: int, report: int | None = None) -> None:
        self.verb = verb
        self.remaining = nth
        self.report = report
        self.lock = threading.Lock()

    def _about_to(self, verb: str) -> None:
        with self.lock:
            self.remaining -= self.verb in (verb, "any")
            if self.remaining <= 0 and self.verb in (verb, "any"):
                if self.report is not None:
                    os.write(self.report, verb.encode())
                os.kill(os.getpid(), signal.SIGKILL)


def _wrapped(verb: str) -> Any:
    def method(self: Dies, *args: Any) -> Any:
        self._about_to(verb)
        return getattr(Disk, verb)(self, *args)

    return method


for _verb in Dies.VERBS:
    setattr(Dies, _verb, _wrapped(_verb))
