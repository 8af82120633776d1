"""Passes over what is no DataLoader: a list of batches, something with a state of its own, any other iterable.

IndexedPass    a sequence: goes on at the index
StatefulPass   state_dict and load_state_dict: says itself where it is
SkippingPass   neither: its items are taken again and dropped
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from reprieve.data.children import end, starting
from reprieve.data.datasets import is_stateful
from reprieve.data.passes import Enter, Pass
from reprieve.data.randomness import Randomness
from reprieve.data.replay import read_again


class IterableSource:
    """Something that can be iterated."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.rng = Randomness(loader)
        self.own: Mapping[str, Any] | None = None
        self.children: weakref.WeakSet[BaseProcess] = weakref.WeakSet()

    def start(self, saved: Mapping[str, Any] | None, enter: Enter | None) -> Pass:
        if isinstance(self.loader, Sequence) or not hasattr(self.loader, "__iter__"):
            return IndexedPass(self, saved, enter)
        if is_stateful(self.loader):
            return StatefulPass(self, saved, enter)
        return SkippingPass(self, saved, enter)

    def state(self) -> dict[str, Any]:
        return self.rng.capture_own()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.own = state
        self.rng.restore_own(state)

    def end_workers(self) -> None:
        end(list(self.children), lambda: None)


class _IterablePass(Pass):
    def __init__(self, source: IterableSource, saved: Mapping[str, Any] | None, enter: Enter | None) -> None:
        super().__init__(saved, enter)
        self._source = source
        self._batches: Iterator[Any] = iter(())

    def _fetch(self) -> Any:
        return next(self._batches)

    def _iterate(self) -> None:
        with starting((), self._source.children):
            self._batches = iter(self._source.loader)

    def close(self) -> None:
        super().close()
        self._batches = iter(())


class IndexedPass(_IterablePass):
    def _begin(self) -> None:
        pass

    def _fetch(self) -> Any:
        try:
            return self._source.loader[self._yielded]
        except IndexError:
            raise StopIteration from None


class StatefulPass(_IterablePass):
    _last: dict[str, Any] | None = None
    """Its state at the last mark, if it is further now."""

    def _begin(self) -> None:
        rng = self._source.rng
        if not self._yielded:
            self._iterate()
            return
        entry = rng.capture()
        if "loader" in self._saved:
            self._source.loader.load_state_dict(self._saved["loader"])
            self._iterate()
        else:
            self._iterate()
            read_again(self._batches, self._yielded, type(self._source.loader).__name__)
        rng.restore(entry)
        if self._source.own is not None:
            rng.restore_own(self._source.own)

    def _fetch(self) -> Any:
        if self._yielded == self._marked:
            self._last = self._source.loader.state_dict()
        return super()._fetch()

    def _state(self) -> dict[str, Any]:
        if self._yielded != self._marked and self._last is not None:
            return {"loader": self._last}
        return {"loader": self._source.loader.state_dict()}


class SkippingPass(_IterablePass):
    _start: Mapping[str, Any]

    def _begin(self) -> None:
        rng = self._source.rng
        entry = rng.capture() if self._yielded else None
        if "start" in self._saved:
            rng.restore(self._saved["start"])
        self._start = rng.capture()
        self._iterate()
        if entry is not None:
            read_again(self._batches, self._yielded, type(self._source.loader).__name__)
            rng.restore(entry)
            if self._source.own is not None:
                rng.restore_own(self._source.own)

    def _state(self) -> dict[str, Any]:
        return {"start": self._start}
