"""A small training loop over the bare loader, or over a ResumableLoader that is stopped and resumed."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from reprieve.data.resumable_loader import ResumableLoader
from reprieve.rng import capture_rng, restore_rng

Trace = list[Any]


def draw() -> list[float]:
    """Draw a number from each global generator, and a normal one from numpy, which keeps half of the pair."""
    return [random.random(), float(np.random.rand()), float(np.random.normal()), float(torch.rand(()))]


class Plain(Dataset[Any]):
    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"index": index, "seed": _seed()}


class Augmented(Plain):
    """A dataset that draws random numbers for most samples."""

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "noise": draw() if index % 7 else [0.0] * 4}


class AtOnce(Augmented):
    """A dataset that reads whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        shift = random.random()
        return [{**self[index], "shift": shift} for index in indices]


class RandomCollator:
    def __call__(self, samples: Any) -> Any:
        return {"samples": samples, "mask": draw()}


class Shards(IterableDataset[Any]):
    """A stream with a state_dict that shuffles through a buffer. The parts of workers have different sizes."""

    def __init__(self, size: int = 23) -> None:
        self.size = size
        self.remaining: list[int] | None = None

    def __iter__(self) -> Any:
        info = get_worker_info()
        worker, count = (info.id, info.num_workers) if info else (0, 1)
        if self.remaining is None:
            first = [0, 12, 16, 22, 23] if count > 1 else [0, 23]
            self.remaining = list(range(first[worker], first[worker + 1] if worker + 1 < count else self.size))
        while self.remaining:
            yield {
                "item": self.remaining.pop(random.randrange(min(3, len(self.remaining)))),
                "noise": draw(),
                "seed": _seed(),
            }
        self.remaining = None

    def state_dict(self) -> dict[str, Any]:
        return {"remaining": None if self.remaining is None else list(self.remaining)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.remaining = None if state["remaining"] is None else list(state["remaining"])


class Counting:
    """An iterator with its own state."""

    def __init__(self, first: int, end: int) -> None:
        self.next, self.end = first, end

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> Any:
        if self.next >= self.end:
            raise StopIteration
        self.next += 1
        return {"item": self.next - 1, "noise": draw()}

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Counted(IterableDataset[Any]):
    def __iter__(self) -> Counting:
        info = get_worker_info()
        return Counting(0, 23) if info is None else Counting(info.id * 10, info.id * 10 + 13 - 5 * info.id)


class Unaware(IterableDataset[Any]):
    """A stream without state_dict. In workers it draws random numbers, which a replay draws again."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        for item in range(0 if info is None else info.id, 23, 1 if info is None else info.num_workers):
            yield {"item": item, "noise": draw() if info is not None else [0.0]}


def _seed() -> int:
    info = get_worker_info()
    return info.seed % (1 << 62) if info is not None else 0


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def same(left: Any, right: Any) -> bool:
    """Whether two traces are equal, with equal types."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(type(left) is type(right) and left == right)


def bare(make: Callable[[], Any], epochs: int = 3) -> list[Trace]:
    """Return what a stock loop sees, by epoch: batches, random numbers between them, and all generators at the end."""
    seed(1)
    loader = make()
    seen: list[Trace] = []
    for epoch in range(epochs):
        _set_epoch(loader, epoch)
        trace: Trace = []
        for batch in loader:
            trace.append([batch, draw()])
        seen.append([*trace, draw()])
    seen.append([capture_rng({})])
    return seen


class Stopped(Exception):
    """Raised at a stop, with what was saved."""


def through(
    make: Callable[[], Any], stops: Sequence[tuple[int, int]], epochs: int = 3, marks_every: int = 1
) -> list[Trace]:
    """Return the same for a ResumableLoader that is stopped and resumed after so many batches of an epoch."""
    seen: list[Trace] = [[] for _ in range(epochs + 1)]
    saved: dict[str, Any] | None = None
    for stop in [*stops, None]:
        saved = read_attempt(make, saved, stop, seen, marks_every)
    return seen


def read_attempt(
    make: Callable[[], Any],
    saved: dict[str, Any] | None,
    stop: tuple[int, int] | None,
    seen: list[Trace],
    marks_every: int = 1,
) -> dict[str, Any] | None:
    """Run from a start to a stop. Returns what is saved there. `seen` has a list for each epoch and for the end."""
    seed(1 if saved is None else 77)
    loader = make()
    source = ResumableLoader(loader)
    try:
        _run(loader, source, saved, stop, seen, len(seen) - 1, marks_every)
    except Stopped as stopped:
        return _saved_and_loaded(stopped.args[0])
    finally:
        source.end_workers()
    return None


def _run(
    loader: Any,
    source: ResumableLoader,
    saved: dict[str, Any] | None,
    stop: tuple[int, int] | None,
    seen: list[Trace],
    epochs: int,
    marks_every: int,
) -> None:
    def rest(epoch: int, **more: Any) -> Stopped:
        return Stopped({"epoch": epoch, "source": source.state(), "rng": capture_rng({}), "pass": None, **more})

    def enter() -> None:
        if saved is not None:
            restore_rng(saved["rng"], {})

    if saved is not None:
        source.restore(saved["source"])
        draw()
    for epoch in range(saved["epoch"] if saved else 0, epochs):
        _set_epoch(loader, epoch)
        first = saved is not None and epoch == saved["epoch"]
        position = saved["pass"] if saved and first else None
        count = position["consumed"] if position else 0
        if first and position is None:
            enter()
        if stop == (epoch, 0) and count == 0:
            raise rest(epoch)
        loader_pass = source.start(position, before_first_fetch=enter if first else None)
        for batch in loader_pass:
            seen[epoch].append([batch, draw()])
            count += 1
            if count % marks_every == 0:
                loader_pass.mark()
                if stop == (epoch, count):
                    raise rest(epoch, **{"pass": loader_pass.state()})
        assert loader_pass.exhausted
        seen[epoch].append(draw())
    seen[epochs].append(capture_rng({}))


def _set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(getattr(loader, "sampler", None), "set_epoch"):
        loader.sampler.set_epoch(epoch)


def _saved_and_loaded(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
