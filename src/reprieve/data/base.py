"""One pass over the batches of a loader: what `ResumableLoader.start` gives, whatever the loader is.

Batches go out through `__next__`; `mark` says that those so far are consumed; `state` is the position at the last mark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from reprieve.data.redistribution import SampleRedistribution

Enter = Callable[[], None]
"""Puts the global random numbers to where the interrupted process had them. Called once, before the first fetch."""


class Pass(ABC):
    """An iterator over the batches of one pass, from its start or from a saved position."""

    def __init__(self, saved: Mapping[str, Any] | None, enter: Enter | None) -> None:
        self._saved: Mapping[str, Any] = saved or {}
        self._enter = enter
        self._yielded = self._marked = int(self._saved.get("consumed", 0))
        self._dealt: Mapping[str, Any] | None = self._saved.get("dealt")
        """Its batches are others than those before it, which count as `at` (dealing.py)."""
        self._at: int = self._dealt["at"] if self._dealt else 0
        self._begun = False
        self.exhausted = False
        """There was no further batch."""

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        # Nothing happens before the first batch is asked for: a stock loop, too, draws its random numbers only then.
        if self.exhausted:
            raise StopIteration
        if not self._begun:
            if self._enter is not None:
                self._enter()
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
        """What was yielded so far is consumed. Called at every step of a run: a microsecond."""
        self._marked = self._yielded

    def state(self) -> dict[str, Any]:
        """The position at the last mark, in types that `torch.load(weights_only=True)` loads."""
        if not self._begun:
            return {"consumed": 0, **self._saved}
        dealt = {"dealt": self._dealt} if self._dealt else {}
        return {"consumed": self._marked, **self._state(), **dealt}

    @abstractmethod
    def _begin(self) -> None:
        """Go to where `_saved` says, and leave the global random numbers as they are."""

    @abstractmethod
    def _fetch(self) -> Any:
        """The next batch, or StopIteration."""

    def _state(self) -> dict[str, Any]:
        """What `_begin` needs besides the number of batches."""
        return {}

    def close(self) -> None:
        """Let go of what the pass holds."""
        self.exhausted = True


class BatchSource(Protocol):
    """Passes over one kind of loader. `ResumableLoader` picks the kind."""

    dealing: SampleRedistribution | None
    """How it deals out its samples; None: that is not known."""

    def start(self, saved: Mapping[str, Any] | None, enter: Enter | None) -> Pass: ...

    def state(self) -> dict[str, Any]:
        """What the next pass depends on, besides a position in it."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def end_workers(self) -> None: ...
