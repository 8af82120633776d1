"""Thin proxies for a dataset, in workers or in the main process.

    PlaceholderDataset   for a map-style dataset: returns placeholders as they are (resumable_sampler.py)
    TrackedIterable      for an iterable dataset: an `IterableCursor` knows its position, if the dataset or its iterator
                         has a `state_dict`

Everything else is forwarded to the dataset.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reprieve.data import hf_streams
from reprieve.data.positions import DatasetPosition
from reprieve.data.resumable_sampler import Placeholder
from reprieve.rng import restore_rng


class PositionError(Exception):
    """A dataset could not load a position that it had returned itself. May come from a worker."""

    @property
    def cause(self) -> str:
        """What the dataset raised. Torch puts a worker's traceback before it."""
        return str(self).rstrip().rpartition("PositionError: ")[2]


class DatasetProxy:
    """A proxy that passes for the dataset: in `isinstance`, and for attributes that are read or set (as a
    `worker_init_fn` does). Its own attributes have names that no dataset has."""

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
    """A map-style dataset that returns placeholders as they are."""

    def __getitem__(self, index: Any) -> Any:
        return index if isinstance(index, Placeholder) else self._reprieve_dataset[index]

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return _pass_placeholders(found) if name == "__getitems__" and found else found


def _pass_placeholders(getitems: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda indices: list(indices) if isinstance(indices, Placeholder) else getitems(indices)


class TrackedIterable(DatasetProxy):
    """An iterable dataset whose iteration a cursor starts and follows."""

    def __init__(self, dataset: Any, cursor: IterableCursor) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_reprieve_cursor", cursor)

    def __iter__(self) -> _TrackedIterator:
        iterator: _TrackedIterator = self._reprieve_cursor.iterate(self._reprieve_dataset)
        return iterator

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._reprieve_dataset, self._reprieve_cursor)


class IterableCursor:
    """The position of an iterable dataset: where its next iteration starts, and where the current one is. Each worker
    has a copy."""

    def __init__(self) -> None:
        self._next: tuple[DatasetPosition | None, Mapping[str, Any] | None, bool] = None, None, False
        self._current: _TrackedIterator | None = None

    def resume_at(
        self, position: DatasetPosition | None, rng: Mapping[str, Any] | None, *, placeholder: bool = False
    ) -> None:
        """Start the next iteration there. `placeholder`: its first item is one."""
        self._next = position, rng, placeholder

    def iterate(self, dataset: Any) -> _TrackedIterator:
        arguments, self._next = self._next, (None, None, False)
        self._current = _TrackedIterator(dataset, *arguments)
        return self._current

    def position(self) -> DatasetPosition | None:
        """Return the position of the current iteration. None: unknown."""
        return self._current.position() if self._current is not None else None


class _TrackedIterator:
    """One iteration over a dataset."""

    def __init__(
        self, dataset: Any, position: DatasetPosition | None, rng: Mapping[str, Any] | None, placeholder: bool
    ) -> None:
        self._dataset = dataset
        self._dataset_is_exact = is_stateful(dataset) and hf_streams.why_inexact(dataset) is None
        self._placeholder_is_next = placeholder
        self._ended = False
        self._is_loading = position is not None
        """A position was loaded, and no item has come since: some datasets load it only with their first item."""
        if position is None:
            self._inner = iter(dataset)
        else:
            with _position_errors():
                self._load(position)
        if rng is not None:
            restore_rng(rng, {})

    def _load(self, position: DatasetPosition) -> None:
        if position.holder == "dataset":
            self._dataset = hf_streams.copy_for_one_pass(self._dataset)
            self._dataset.load_state_dict(position.state)
        self._inner = iter(self._dataset)
        self._ended = position.ended
        if position.holder == "iterator":
            self._inner.load_state_dict(position.state)

    def __iter__(self) -> _TrackedIterator:
        return self

    def __next__(self) -> Any:
        if self._placeholder_is_next:
            self._placeholder_is_next = False
            return Placeholder()
        if self._ended:
            raise StopIteration
        try:
            return self._first_after_loading() if self._is_loading else next(self._inner)
        except StopIteration:
            self._ended = True
            raise

    def _first_after_loading(self) -> Any:
        self._is_loading = False
        with _position_errors():
            return next(self._inner)

    def position(self) -> DatasetPosition | None:
        if is_stateful(self._inner):
            return DatasetPosition(holder="iterator", state=self._inner.state_dict(), ended=self._ended)
        if self._dataset_is_exact:
            return DatasetPosition(holder="dataset", state=self._dataset.state_dict(), ended=self._ended)
        return None


@contextlib.contextmanager
def _position_errors() -> Iterator[None]:
    """Turn whatever a dataset raises into a PositionError."""
    try:
        yield
    except StopIteration:
        raise
    except Exception as error:
        raise PositionError(f"{type(error).__name__}: {error}") from error


def is_stateful(candidate: Any) -> bool:
    """Whether it has the protocol of torchdata's StatefulDataLoader."""
    return callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None))
