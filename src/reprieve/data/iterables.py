"""Passes over what is no DataLoader.

    IndexedPass    a list of batches or another sequence: goes on at the index
    StatefulPass   something with state_dict and load_state_dict: says itself where it is
    SkippingPass   any other iterable: its items are taken again and dropped

The second is also for torchdata's StatefulDataLoader.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from reprieve.data import hf_streams
from reprieve.data.base import Enter, Pass
from reprieve.data.dataset_proxies import is_stateful
from reprieve.data.loader_rng import LoaderRng, restore_global
from reprieve.data.redistribution import SampleRedistribution
from reprieve.data.replay import NO_STATE, read_again
from reprieve.data.worker_processes import end, noted
from reprieve.rng import capture_rng


class IterableSource:
    """Something that can be iterated."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.dealing: SampleRedistribution | None = None
        self.rng = LoaderRng(loader)
        self.own: Mapping[str, Any] | None = None
        self.children: weakref.WeakSet[BaseProcess] = weakref.WeakSet()

    def start(self, saved: Mapping[str, Any] | None, enter: Enter | None) -> Pass:
        if isinstance(self.loader, Sequence) or not hasattr(self.loader, "__iter__"):
            return IndexedPass(self, saved, enter)
        why_inexact = hf_streams.why_inexact(getattr(self.loader, "dataset", None))
        if why_inexact is not None or not is_stateful(self.loader):
            return SkippingPass(self, saved, enter, why_inexact or NO_STATE)
        return StatefulPass(self, saved, enter, "has saved no position of its own")

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
        with noted(self._source.children):
            self._batches = iter(self._source.loader)

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


class SkippingPass(_IterablePass):
    def __init__(
        self, source: IterableSource, saved: Mapping[str, Any] | None, enter: Enter | None, why_again: str
    ) -> None:
        super().__init__(source, saved, enter)
        self._why_again = why_again

    def _begin(self) -> None:
        entry = capture_rng({})
        if "start" in self._saved:
            self._source.rng.restore(self._saved["start"])
        self._start: Mapping[str, Any] = self._source.rng.capture()
        self._iterate()
        if self._yielded:
            read_again(self._batches, self._yielded, type(self._source.loader).__name__, self._why_again)
            self._set_back(entry)

    def _state(self) -> dict[str, Any]:
        return {"start": self._start}


class StatefulPass(SkippingPass):
    _last: dict[str, Any] | None = None
    """Its state at the last mark, if it is further now."""
    _entering = 0
    """Its state was loaded, and until so many batches have come, each worker may still find that it does not fit."""

    def _begin(self) -> None:
        if "loader" not in self._saved:
            super()._begin()
            return
        entry = capture_rng({})
        # A checkpoint of an earlier version has no start.
        self._start = self._saved.get("start", entry)
        self._entering = max(1, getattr(self._source.loader, "num_workers", 0))
        self._dataset_before = hf_streams.loaded_position(self._dataset)
        try:
            self._source.loader.load_state_dict(self._saved["loader"])
            self._iterate()
        except Exception as error:  # noqa: BLE001 - whatever a dataset raises
            self._read_again_after(error)
        if self._yielded:
            self._set_back(entry)

    def _fetch(self) -> Any:
        if self._yielded == self._marked:
            self._last = self._source.loader.state_dict()
        if not self._entering:
            return super()._fetch()
        self._entering -= 1
        try:
            return super()._fetch()
        except StopIteration:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a dataset raises
            self._read_again_after(error)
            return super()._fetch()
        finally:
            hf_streams.set_loaded_position(self._dataset, self._dataset_before)

    def _read_again_after(self, error: Exception) -> None:
        """The state cannot be loaded: only the number of batches is left of the position."""
        self._entering = 0
        hf_streams.set_loaded_position(self._dataset, self._dataset_before)
        self._why_again = f"cannot load the state that it saved ({type(error).__name__}: {error})"
        self._saved = {name: value for name, value in self._saved.items() if name != "loader"}
        with contextlib.suppress(Exception):
            self._source.loader.load_state_dict({})  # torchdata's: as if none had been loaded
        super()._begin()

    @property
    def _dataset(self) -> Any:
        return getattr(self._source.loader, "dataset", None)

    def _state(self) -> dict[str, Any]:
        if hf_streams.is_stream(self._dataset) and self._marked < getattr(self._source.loader, "num_workers", 0):
            return super()._state()  # in a worker that has given nothing yet, such a stream says that of all workers
        ahead = self._yielded != self._marked and self._last is not None
        return {**super()._state(), "loader": self._last if ahead else self._source.loader.state_dict()}
