"""Thin stand-ins for a dataset, in workers or in the main process.

    Answering   a map-style dataset that answers blanks (sampling.py)
    Followed    an iterable one; `IterableCursor` knows where it is, if the dataset or its iterator has a state_dict

All else that is asked of them is the dataset's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reprieve.data import hf_streams
from reprieve.data.resumable_sampler import Placeholder
from reprieve.rng import restore_rng


class PositionError(Exception):
    """The dataset could not load a position that it had given out itself. May come from a worker."""

    @property
    def cause(self) -> str:
        """What it raised. Torch puts a worker's traceback before it."""
        return str(self).rstrip().rpartition("PositionError: ")[2]


class DatasetProxy:
    """Is taken for the dataset: `isinstance`, attributes read and set (a worker_init_fn does that). Its own attributes
    have names that no dataset has."""

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_reprieve_dataset", dataset)

    @property
    def __class__(self) -> Any:
        return self._reprieve_dataset.__class__

    @__class__.setter
    def __class__(self, other: Any) -> None:
        self._reprieve_dataset.__class__ = other

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_reprieve_dataset"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._reprieve_dataset, name, value)

    def __len__(self) -> int:
        return len(self._reprieve_dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._reprieve_dataset,)


class PlaceholderDataset(DatasetProxy):
    """A map-style dataset."""

    def __getitem__(self, index: Any) -> Any:
        return index if isinstance(index, Placeholder) else self._reprieve_dataset[index]

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return _blank_or(found) if name == "__getitems__" and found else found


def _blank_or(getitems: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda indices: list(indices) if isinstance(indices, Placeholder) else getitems(indices)


class TrackedIterable(DatasetProxy):
    """An iterable dataset."""

    def __init__(self, dataset: Any, items: IterableCursor) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_reprieve_items", items)

    def __iter__(self) -> _Going:
        going: _Going = self._reprieve_items.begin(self._reprieve_dataset)
        return going

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._reprieve_dataset, self._reprieve_items)


class IterableCursor:
    """Where an iterable dataset goes on, and where it is. Each worker has a copy."""

    def __init__(self) -> None:
        self._next: tuple[Any, Any, bool] = None, None, False
        self._going: _Going | None = None

    def go_on(self, position: Mapping[str, Any] | None, rng: Mapping[str, Any] | None, *, blank: bool = False) -> None:
        """The next iteration goes on there. `blank`: its first item is none."""
        self._next = position, rng, blank

    def begin(self, dataset: Any) -> _Going:
        then, self._next = self._next, (None, None, False)
        self._going = _Going(dataset, *then)
        return self._going

    def position(self) -> dict[str, Any] | None:
        """None: it cannot tell."""
        return self._going.position() if self._going is not None else None


class _Going:
    """One iteration."""

    def __init__(self, dataset: Any, position: Any, rng: Any, blank: bool) -> None:
        self._dataset = dataset
        self._tells = is_stateful(dataset) and hf_streams.why_inexact(dataset) is None
        self._blank = blank
        self._ended = False
        self._entering = position is not None
        """A position was loaded, and no item has come since: some datasets load it only then."""
        if position is None:
            self._inner = iter(dataset)
        else:
            with _loading():
                self._enter(position)
        if rng is not None:
            restore_rng(rng, {})

    def _enter(self, position: Mapping[str, Any]) -> None:
        if position["of"] == "dataset":
            self._dataset = hf_streams.for_one_pass(self._dataset)
            self._dataset.load_state_dict(position["state"])
        self._inner = iter(self._dataset)
        self._ended = position["ended"]
        if position["of"] == "iterator":
            self._inner.load_state_dict(position["state"])

    def __iter__(self) -> _Going:
        return self

    def __next__(self) -> Any:
        if self._blank:
            self._blank = False
            return Placeholder()
        if self._ended:
            raise StopIteration
        try:
            return self._first() if self._entering else next(self._inner)
        except StopIteration:
            self._ended = True
            raise

    def _first(self) -> Any:
        self._entering = False
        with _loading():
            return next(self._inner)

    def position(self) -> dict[str, Any] | None:
        if is_stateful(self._inner):
            return {"of": "iterator", "state": self._inner.state_dict(), "ended": self._ended}
        if self._tells:
            return {"of": "dataset", "state": self._dataset.state_dict(), "ended": self._ended}
        return None


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    try:
        yield
    except StopIteration:
        raise
    except Exception as error:
        raise PositionError(f"{type(error).__name__}: {error}") from error


def is_stateful(one: Any) -> bool:
    """The protocol of torchdata's StatefulDataLoader."""
    return callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))
