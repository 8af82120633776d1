"""Reprieve itself: `Checkpointer.save` (durable on return), a background save, `restore` (verified), many tiny tensors.

Retention works in the background after a save. The benchmark waits for it, and removes older checkpoints, outside of
the measured time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from benchmarks.measure import Extras, Job
from benchmarks.peers import check_restored, flush
from benchmarks.state import TrainingState, fingerprint
from reprieve import Checkpointer

TINY = 100_000
_steps = count(1)


class Ours:
    """A Checkpointer in its own folder, created when first needed."""

    def __init__(self, folder: Path, parts: Callable[[], Mapping[str, Any]]) -> None:
        self._folder = folder
        self._parts = parts
        self._checkpointer: Checkpointer | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(self._folder, keep=1, **self._parts())
        return self._checkpointer

    def open(self) -> None:
        self.checkpointer.wait()

    def save(self) -> None:
        self.checkpointer.save(next(_steps))

    def remove(self) -> None:
        """The saved checkpoint, once all background work is done."""
        self.checkpointer.wait()
        for found in self.checkpointer.checkpoints():
            shutil.rmtree(found.path)

    def close(self) -> None:
        """Close it and free its memory: the next one starts afresh."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
            shutil.rmtree(self._folder)

    def warm_up(self) -> None:
        self.checkpointer.warm_up(wait=True)

    def save_in_background(self) -> Extras:
        save = self.checkpointer.save(next(_steps), background=True)
        save.wait()
        return {"blocked_s": save.blocked.total_seconds()}

    def make_ready_to_restore(self, state: TrainingState) -> None:
        if not self.checkpointer.checkpoints():
            self.checkpointer.save(next(_steps))
        self.checkpointer.wait()
        state.wipe()

    def restore(self) -> None:
        restored = self.checkpointer.restore()
        if restored is None or restored.passed_over:
            raise RuntimeError(f"our own checkpoint was not restored: {restored}")


class Memcpy:
    """Copy the state once within memory: a background save's pause is compared with this."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._copies: list[torch.Tensor] = []

    def make_room(self) -> None:
        if not self._copies:
            self._copies = [torch.zeros_like(tensor).fill_(1) for tensor in self._state.tensors().values()]

    def copy(self) -> None:
        for copy, tensor in zip(self._copies, self._state.tensors().values(), strict=True):
            copy.copy_(tensor)


@cache
def tiny_tensors() -> dict[str, torch.Tensor]:
    values = torch.rand(TINY, 16)
    return {f"layer.{index}.weight": values[index].clone() for index in range(TINY)}


@cache
def tiny_module() -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tiny_tensors().items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor, requires_grad=False))
    return module


def jobs(folder: Path, state: TrainingState) -> tuple[list[Job], Callable[[], None]]:
    """The jobs, and a function that closes what they leave open."""
    expected = fingerprint(state.tensors())
    size = state.bytes
    lasting, first, background, restoring = (
        Ours(folder / name, state.parts) for name in ("lasting", "first", "background", "restoring")
    )
    memory = Memcpy(state)
    found = [
        Job("memcpy.state", memory.copy, before=memory.make_room, bytes=size, label="memcpy"),
        Job(
            "save",
            lasting.save,
            before=lasting.open,
            after=lasting.remove,
            bytes=size,
            label="reprieve",
            limit="disk.write",
        ),
        Job(
            "save.first",
            first.save,
            before=first.open,
            after=first.close,
            bytes=size,
            label="reprieve, a process's first",
            limit="disk.write",
        ),
        Job(
            "save.background",
            background.save_in_background,
            before=background.warm_up,
            after=background.remove,
            bytes=size,
            label="reprieve, in the background",
            limit="disk.write",
        ),
        Job(
            "restore",
            restoring.restore,
            before=partial(restoring.make_ready_to_restore, state),
            after=partial(check_restored, state, expected, "reprieve"),
            bytes=size,
            label="reprieve, verified",
            limit="disk.read",
        ),
    ]
    tiny, close_tiny = _tiny_jobs(folder)

    def close() -> None:
        for one in (lasting, first, background, restoring):
            one.close()
        close_tiny()

    return [*found, *tiny], close


def _tiny_jobs(folder: Path) -> tuple[list[Job], Callable[[], None]]:
    """100,000 tensors of 64 bytes: what a save costs besides the bytes. As a dict, and as a module's parameters."""
    tree = Ours(folder / "tiny", lambda: {"tiny": tiny_tensors()})
    model = Ours(folder / "tiny-model", lambda: {"model": tiny_module()})
    written = folder / "tiny-peer"

    def make_ready() -> None:
        tiny_tensors()
        written.mkdir()

    def by_torch() -> None:
        torch.save(tiny_tensors(), written / "tiny.pt")
        flush(written)

    def by_safetensors() -> None:
        safetensors.torch.save_file(tiny_tensors(), written / "tiny.safetensors")
        flush(written)

    peer_jobs = [
        Job(f"peers.{name}.save.tiny_100k", run, before=make_ready, after=partial(shutil.rmtree, written))
        for name, run in (("torch", by_torch), ("safetensors", by_safetensors))
    ]
    ours = [
        Job("save.tiny_100k", tree.save, before=tree.open, after=tree.remove),
        Job("save.tiny_100k_model", model.save, before=model.open, after=model.remove),
    ]

    def close() -> None:
        tree.close()
        model.close()

    return [*ours, *peer_jobs], close
