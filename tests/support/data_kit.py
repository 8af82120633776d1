"""A small training loop over data: over the bare loader, or through a ResumableLoader that is stopped and resumed."""

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
    """One number of each global generator, and one of numpy that leaves half of a pair for the next."""
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
    """Draws random numbers for each sample, but none for some."""

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "noise": draw() if index % 7 else [0.0] * 4}


class AtOnce(Augmented):
    """Reads whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        shift = random.random()
        return [{**self[index], "shift": shift} for index in indices]


class RandomCollator:
    def __call__(self, samples: Any) -> Any:
        return {"samples": samples, "mask": draw()}


class Shards(IterableDataset[Any]):
    """Uneven parts for the workers; can tell where it is; shuffles through a buffer."""

    def __init__(self, size: int = 23) -> None:
        self.size = size
        self.left: list[int] | None = None

    def __iter__(self) -> Any:
        info = get_worker_info()
        worker, count = (info.id, info.num_workers) if info else (0, 1)
        if self.left is None:
            first = [0, 12, 16, 22, 23] if count > 1 else [0, 23]
            self.left = list(range(first[worker], first[worker + 1] if worker + 1 < count else self.size))
        while self.left:
            yield {"item": self.left.pop(random.randrange(min(3, len(self.left)))), "noise": draw(), "seed": _seed()}
        self.left = None

    def state_dict(self) -> dict[str, Any]:
        return {"left": None if self.left is None else list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = None if state["left"] is None else list(state["left"])


class Counting:
    """An iterator with a state of its own."""

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
    """Cannot tell where it is. With workers its random numbers are its own, so that reading again gives the same."""

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


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


def bare(make: Callable[[], Any], epochs: int = 3) -> list[Trace]:
    """What a stock loop sees, epoch by epoch: batches, random numbers between them, and all generators at the end."""
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
    """With what was saved."""


def through(
    make: Callable[[], Any], stops: Sequence[tuple[int, int]], epochs: int = 3, marks_every: int = 1
) -> list[Trace]:
    """The same through a ResumableLoader, stopped after so many batches of an epoch, and each time started anew."""
    seen: list[Trace] = [[] for _ in range(epochs + 1)]
    saved: dict[str, Any] | None = None
    for stop in [*stops, None]:
        saved = attempt(make, saved, stop, seen, marks_every)
    return seen


def attempt(
    make: Callable[[], Any],
    saved: dict[str, Any] | None,
    stop: tuple[int, int] | None,
    seen: list[Trace],
    marks_every: int = 1,
) -> dict[str, Any] | None:
    """From one start to a stop: what is saved there. `seen` has a place for each epoch, and one for the end."""
    seed(1 if saved is None else 77)
    loader = make()
    source = ResumableLoader(loader)
    try:
        _go_on(loader, source, saved, stop, seen, len(seen) - 1, marks_every)
    except Stopped as stopped:
        return _through_a_file(stopped.args[0])
    finally:
        source.end_workers()
    return None


def _go_on(
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
        one = source.start(position, before_first_fetch=enter if first else None)
        for batch in one:
            seen[epoch].append([batch, draw()])
            count += 1
            if count % marks_every == 0:
                one.mark()
                if stop == (epoch, count):
                    raise rest(epoch, **{"pass": one.state()})
        assert one.exhausted
        seen[epoch].append(draw())
    seen[epochs].append(capture_rng({}))


def _set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(getattr(loader, "sampler", None), "set_epoch"):
        loader.sampler.set_epoch(epoch)


def _through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
