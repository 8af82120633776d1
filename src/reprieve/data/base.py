"""The interfaces behind `ResumableLoader`: a pass over batches, and a source of passes for each kind of loader.

A training loop takes batches from a `Pass`. It calls `mark` when a step is complete: the batches yielded so far are
then consumed. `state` returns the position at the last mark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from reprieve.data.positions import LoaderPosition, PassPosition
from reprieve.data.redistribution import SampleRedistribution

BeforeFirstFetch = Callable[[], None]
"""Restores the global random number generators of the interrupted process. Called once, before the first fetch."""


class Pass(ABC):
    """An iterator over the batches of one pass, from its start or from a saved position."""

    def __init__(self, saved: PassPosition | None, before_first_fetch: BeforeFirstFetch | None) -> None:
        self._saved = saved or PassPosition()
        self._before_first_fetch = before_first_fetch
        self._yielded = self._marked = self._saved.consumed
        self._redistribution = self._saved.redistribution
        self._first_batch = self._redistribution.first_batch if self._redistribution else 0
        """The number of the first batch that this loader makes (redistribution.py)."""
        self._begun = False
        self.exhausted = False
        """There was no further batch."""

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        # Nothing happens before the first batch is requested: a stock loop, too, draws its random numbers only then.
        if self.exhausted:
            raise StopIteration
        if not self._begun:
            if self._before_first_fetch is not None:
                self._before_first_fetch()
            self._begin()
            self._begun = True
        try:
            batch = self._fetch()
        except StopIteration:
            self.exhausted = True
            raise
        self._yielded += 1
        return batch

    def mark(self) -> None:
        """Count the batches yielded so far as consumed. Called at every step of a run: takes a microsecond."""
        self._marked = self._yielded

    def position(self) -> PassPosition:
        """Return the position at the last mark."""
        if not self._begun:
            return self._saved
        return replace(self._position(), consumed=self._marked, redistribution=self._redistribution)

    def state(self) -> dict[str, Any]:
        """Return the position at the last mark, in types that `torch.load(weights_only=True)` loads."""
        return self.position().to_state()

    @abstractmethod
    def _begin(self) -> None:
        """Go to the saved position. The global random number generators stay as they are."""

    @abstractmethod
    def _fetch(self) -> Any:
        """Return the next batch, or raise StopIteration."""

    def _position(self) -> PassPosition:
        """Return what `_begin` needs besides the number of batches."""
        return PassPosition()

    def close(self) -> None:
        """Release what the pass holds."""
        self.exhausted = True


class BatchSource(Protocol):
    """Passes over one kind of loader. `ResumableLoader` picks the kind."""

    redistribution: SampleRedistribution | None
    """How the loader makes batches of its samples. None: unknown."""

    def start(self, saved: PassPosition | None, before_first_fetch: BeforeFirstFetch | None) -> Pass: ...

    def position(self) -> LoaderPosition:
        """Return what the next pass depends on, besides a position in it."""
        ...

    def restore(self, position: LoaderPosition) -> None: ...

    def end_workers(self) -> None: ...
