"""How many returned saves a power cut loses, for each peer's ordinary way of saving.

For each cut: a fresh ext4 (tests/powercut/rigs/loopfs.py), a process that saves step 1, 2, 3 … and reports each save
call that returned, the power cut at a random moment, a remount, and a check that the newest checkpoint whose save had
returned loads bit for bit. Needs root. The table goes to stdout, or `--json`.

    python -m benchmarks.powercut_peers --cuts 50 --pause 0

With --pause 0 the newest save is milliseconds old at the cut and the oldest a second: the worst case, and why there is
often nothing older to fall back on. With a longer pause between the saves the kernel has time to write back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from tests.powercut.rigs.loopfs import LoopDisk, why_unavailable
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load_state
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save_state

from reprieve import Checkpointer
from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.verify import verify

DISK_BYTES = 256 << 20
TENSORS, TENSOR_VALUES = 4, 128 << 10  # 2 MiB a checkpoint in float32: 100 of them fit on the disk
MOST_SAVES_BEFORE_CUT = 8
MOST_WAIT_S = 0.05
GIVE_UP_S = 60

State = dict[str, Any]


class Peer(NamedTuple):
    save: Callable[[Path, int], None]
    """save(folder, step): returns when the peer reports it as saved."""
    load: Callable[[Path, int], State]
    """load(folder, step): that step's state; raises where it cannot be loaded."""


def state_of(step: int) -> State:
    """The state at a step, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    return {f"layer{i}.weight": torch.rand(TENSOR_VALUES, generator=generator) for i in range(TENSORS)}


def step_folder(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(exist_ok=True)
    return path


def torch_save_one_name(folder: Path, step: int) -> None:
    torch.save(state_of(step), folder / "last.pt")


def torch_load_one_name(folder: Path, step: int) -> State:
    return dict(torch.load(folder / "last.pt"))


def torch_save_new(folder: Path, step: int) -> None:
    torch.save(state_of(step), step_folder(folder, step) / "state.pt")


def torch_load_new(folder: Path, step: int) -> State:
    return dict(torch.load(folder / f"checkpoint-{step}" / "state.pt"))


def safetensors_save(folder: Path, step: int) -> None:
    safetensors.torch.save_file(state_of(step), step_folder(folder, step) / "model.safetensors")


def safetensors_load(folder: Path, step: int) -> State:
    return dict(safetensors.torch.load_file(folder / f"checkpoint-{step}" / "model.safetensors"))


def dcp_save(folder: Path, step: int) -> None:
    dcp_save_state(state_of(step), checkpoint_id=folder / f"checkpoint-{step}", no_dist=True)


def dcp_load(folder: Path, step: int) -> State:
    state = {name: torch.zeros_like(tensor) for name, tensor in state_of(step).items()}
    dcp_load_state(state, checkpoint_id=folder / f"checkpoint-{step}", no_dist=True)
    return state


def synced_save(folder: Path, step: int) -> None:
    """The control: unless this row loses nothing, the others' numbers mean nothing."""
    path = step_folder(folder, step) / "state.pt"
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save(state_of(step), file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".tmp").rename(path)
    for parent in (path.parent, folder):
        fd = os.open(parent, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


_ours: dict[Path, tuple[Checkpointer, State]] = {}


def reprieve_save(folder: Path, step: int) -> None:
    if folder not in _ours:
        state = state_of(0)
        _ours[folder] = Checkpointer(folder / "ours", keep=None, rng=False, state=state), state
    checkpointer, state = _ours[folder]
    state.update(state_of(step))
    checkpointer.save(step)


def reprieve_load(folder: Path, step: int) -> State:
    checkpoint = folder / "ours" / f"checkpoint-{step}"
    verify(checkpoint, BlockPool())
    return dict(torch.load(checkpoint / "state.pt"))


PEERS: dict[str, Peer] = {
    "reprieve": Peer(reprieve_save, reprieve_load),
    "control: synced by hand": Peer(synced_save, torch_load_new),
    "torch.save, one name": Peer(torch_save_one_name, torch_load_one_name),
    "torch.save, new file": Peer(torch_save_new, torch_load_new),
    "safetensors save_file": Peer(safetensors_save, safetensors_load),
    "torch DCP save": Peer(dcp_save, dcp_load),
}


class Cut(NamedTuple):
    returned: int
    """The newest step whose save had returned when the power went."""
    found: int
    """The newest step that loads bit for bit afterwards; 0: none."""


def check_without_cut(name: str, peer: Peer) -> None:
    """A peer that cannot load what it saved on a healthy disk would count as lost for the wrong reason."""
    with LoopDisk(DISK_BYTES) as disk:
        with Worker(lambda report: save_steps(peer, disk.path, [1], 0, report)) as saver:
            saver.step()
        disk.remount()
        with Worker(lambda report: report(newest_loadable(peer, disk.path, 1))) as loader:
            if loader.step() != 1:
                raise RuntimeError(f"{name}: does not load its own save, with no cut at all")


def cut_once(peer: Peer, rng: random.Random, pause_s: float) -> Cut:
    with LoopDisk(DISK_BYTES) as disk:
        with Worker(lambda report: save_steps(peer, disk.path, count(1), pause_s, report)) as saver:
            for _ in range(rng.randint(1, MOST_SAVES_BEFORE_CUT)):
                returned = saver.step()
            time.sleep(rng.uniform(0, MOST_WAIT_S + pause_s))
            while saver.ready():
                returned = saver.step()
            disk.cut()
            saver.kill()
            # A save may have completed between the last report and the cut: not required, but as good.
            newest = max([returned, *saver.rest()])
        disk.remount()
        with Worker(lambda report: report(newest_loadable(peer, disk.path, newest + 1))) as loader:
            return Cut(returned, loader.step())


def save_steps(peer: Peer, folder: Path, steps: Iterable[int], pause_s: float, report: Callable[[int], None]) -> None:
    for step in steps:
        peer.save(folder, step)
        report(step)
        time.sleep(pause_s)


def newest_loadable(peer: Peer, folder: Path, newest: int) -> int:
    for step in range(newest, 0, -1):
        expected = state_of(step)
        try:
            found = peer.load(folder, step)
            if found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected):
                return step
        except BaseException:  # noqa: BLE001 - DCP's CheckpointException is not an Exception
            continue
    return 0


class Worker:
    """A forked process that saves and reports step numbers on a pipe.

    It is forked here, where torch is imported but was never used, so that no threads get lost.
    """

    def __init__(self, work: Callable[[Callable[[int], None]], None]) -> None:
        self._reports, writing = os.pipe()
        self._errors = os.memfd_create("errors")
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._reports)
                os.dup2(self._errors, 2)  # what a peer prints while its disk fails is noise
                torch.set_num_threads(1)
                work(lambda step: report(writing, step))
            except BaseException:  # noqa: BLE001 - a fork must not continue in its parent's code
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(writing)
        self._alive = True

    def ready(self, wait_s: float = 0) -> bool:
        return bool(select.select([self._reports], [], [], wait_s)[0])

    def step(self) -> int:
        """Wait for the next report."""
        if self.ready(GIVE_UP_S) and (step := os.read(self._reports, 4)):
            return int.from_bytes(step, "little")
        raise RuntimeError("the worker ended early or hangs:\n" + os.pread(self._errors, 10_000, 0).decode())

    def rest(self) -> list[int]:
        """Return all remaining reports, once it is killed."""
        with open(self._reports, "rb", closefd=False) as file:
            return [step for (step,) in struct.iter_unpack("<I", file.read())]

    def kill(self) -> None:
        if self._alive:
            self._alive = False
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._reports)
        os.close(self._errors)


def report(fd: int, step: int) -> None:
    os.write(fd, struct.pack("<I", step))


def summary(cuts: list[Cut]) -> dict[str, int]:
    lost = [cut for cut in cuts if cut.found < cut.returned]
    return {
        "cuts": len(cuts),
        "lost": len(lost),
        "nothing_left": sum(cut.found == 0 for cut in lost),
        "saves_returned": sum(cut.returned for cut in cuts),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=50, help="power cuts for each peer (50)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between saves (0)")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="only this one (may be repeated)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if reason := why_unavailable():
        print(f"cannot cut a disk here: {reason}", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    results = {}
    for name in options.peer or PEERS:
        rng = random.Random(options.seed)
        began = time.monotonic()
        check_without_cut(name, PEERS[name])
        results[name] = summary([cut_once(PEERS[name], rng, options.pause) for _ in range(options.cuts)])
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    if options.json:
        print(json.dumps({"pause_s": options.pause, "seed": options.seed, "peers": results}, indent=2))
        return 0
    print(f"{'way of saving':24} {'cuts':>5} {'newest lost':>12} {'nothing loads':>14}")
    for name, row in results.items():
        print(f"{name:24} {row['cuts']:5} {row['lost']:12} {row['nothing_left']:14}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
