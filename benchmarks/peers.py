"""The usual ways of saving. None of them flushes everything: the benchmark does, and counts it.

A load ends with the bytes in the live model and optimizer, by the cheapest of the ordinary ways.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.measure import Extras, Job
from benchmarks.state import TrainingState, fingerprint

Move = Callable[[TrainingState, Path], None]


class Peer(NamedTuple):
    label: str
    save: Move
    """Saves into an existing folder."""
    load: Move
    saves: bool = True
    """False: it saves as another peer does, and only loads differently."""


def flush(folder: Path) -> None:
    """Flush every file and folder below, and the name of the folder itself."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _tree(state: TrainingState) -> dict[str, Any]:
    return {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict(),
    }


def _safetensors_save(state: TrainingState, folder: Path) -> None:
    safetensors.torch.save_file(state.tensors(), folder / "state.safetensors")


def _copy_safetensors(path: Path, into: dict[str, torch.Tensor]) -> None:
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(file.get_tensor(name))


def _safetensors_load(state: TrainingState, folder: Path) -> None:
    _copy_safetensors(folder / "state.safetensors", state.tensors())


def _torch_save(state: TrainingState, folder: Path) -> None:
    torch.save(_tree(state), folder / "state.pt")


def _torch_load(state: TrainingState, folder: Path) -> None:
    tree = torch.load(folder / "state.pt", weights_only=True)
    state.model.load_state_dict(tree["model"])
    state.optimizer.load_state_dict(tree["optimizer"])  # adopts the loaded tensors, no copy
    state.scheduler.load_state_dict(tree["scheduler"])


def _torch_mmap_load(state: TrainingState, folder: Path) -> None:
    tree = torch.load(folder / "state.pt", weights_only=True, mmap=True)
    state.model.load_state_dict(tree["model"])
    # load_state_dict would adopt the mapped tensors, and nothing would have been read yet.
    live = state.optimizer.state_dict()["state"]
    for index, values in tree["optimizer"]["state"].items():
        for name, value in values.items():
            live[index][name].copy_(value)
    state.scheduler.load_state_dict(tree["scheduler"])


def _hf_save(state: TrainingState, folder: Path) -> None:
    safetensors.torch.save_file(state.model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(state.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(state.scheduler.state_dict(), folder / "scheduler.pt")


def _hf_load(state: TrainingState, folder: Path) -> None:
    _copy_safetensors(folder / "model.safetensors", state.model.state_dict())
    state.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    state.scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))


def _dcp_save(threads: int, state: TrainingState, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(_tree(state), storage_writer=FileSystemWriter(folder, thread_count=threads), no_dist=True)


def _dcp_load(state: TrainingState, folder: Path) -> None:
    tree = _tree(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(tree, storage_reader=FileSystemReader(folder), no_dist=True)
    state.scheduler.load_state_dict(tree["scheduler"])


PEERS = {
    "safetensors": Peer("safetensors", _safetensors_save, _safetensors_load),
    "torch": Peer("torch.save / torch.load", _torch_save, _torch_load),
    "torch_mmap": Peer("torch.load, mmap", _torch_save, _torch_mmap_load, saves=False),
    "hf": Peer("HF layout", _hf_save, _hf_load),
    "dcp_1": Peer("DCP, 1 thread", partial(_dcp_save, 1), _dcp_load),
    "dcp_2": Peer("DCP, 2 threads", partial(_dcp_save, 2), _dcp_load),
}


def save_durably(peer: Peer, state: TrainingState, folder: Path) -> Extras:
    start = time.perf_counter()
    peer.save(state, folder)
    returned = time.perf_counter() - start
    flush(folder)
    return {"returned_s": returned}


def jobs(folder: Path, state: TrainingState) -> list[Job]:
    expected = fingerprint(state.tensors())
    found = []
    for name, peer in PEERS.items():
        # Files that differ only in how they are loaded are written once.
        kept = folder / (name if peer.saves else "torch")
        written = folder / f"{name}-new"
        if peer.saves:
            found.append(
                Job(
                    f"peers.{name}.save",
                    partial(save_durably, peer, state, written),
                    before=written.mkdir,
                    after=partial(shutil.rmtree, written),
                    bytes=state.bytes,
                    label=peer.label,
                    limit="disk.write",
                )
            )
        found.append(
            Job(
                f"peers.{name}.restore",
                partial(peer.load, state, kept),
                before=partial(_make_ready, peer, state, kept),
                after=partial(check_restored, state, expected, name),
                bytes=state.bytes,
                label=peer.label,
                limit="disk.read",
            )
        )
    return found


def _make_ready(peer: Peer, state: TrainingState, folder: Path) -> None:
    if not folder.exists():
        folder.mkdir()
        save_durably(peer, state, folder)
    state.wipe()


def check_restored(state: TrainingState, expected: dict[str, tuple[int, ...]], name: str) -> None:
    """Raise unless the load restored every bit: otherwise its time means nothing."""
    if fingerprint(state.tensors()) != expected:
        raise RuntimeError(f"{name}: what was restored is not what was saved")
