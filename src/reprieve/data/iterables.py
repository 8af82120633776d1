"""Passes over what is no DataLoader.

    IndexedPass    a list of batches or another sequence: goes on at the index
    StatefulPass   something with state_dict and load_state_dict: says itself where it is
    SkippingPass   any other iterable: its items are taken again and dropped

The second is also for torchdata's StatefulDataLoader, whose workers then do not ignore signals.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from reprieve.checkpoint.rng import capture_rng
from reprieve.data.children import end, starting
from reprieve.data.datasets import is_stateful
from reprieve.data.dealing import Dealing
from reprieve.data.passes import Enter, Pass
from reprieve.data.randomness import Randomness, restore_global
from reprieve.data.replay import read_again


class IterableSource:
    """Something that can be iterated."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.dealing: Dealing | None = None
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

    def _read_again(self) -> None:
        read_again(self._batches, self._yielded, type(self._source.loader).__name__)

    def _set_back(self, entry: Mapping[str, Any]) -> None:
        """The random numbers to where they were before the position was looked for."""
        restore_global(entry)
        if self._source.own is not None:
            self._source.rng.restore_generators(self._source.own)

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
        entry = capture_rng({})
        if "loader" in self._saved:
            self._source.loader.load_state_dict(self._saved["loader"])
        self._iterate()
        if self._yielded:
            if "loader" not in self._saved:
                self._read_again()
            self._set_back(entry)

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
        entry = capture_rng({})
        if "start" in self._saved:
            self._source.rng.restore(self._saved["start"])
        self._start = self._source.rng.capture()
        self._iterate()
        if self._yielded:
            self._read_again()
            self._set_back(entry)

    def _state(self) -> dict[str, Any]:
        return {"start": self._start}
