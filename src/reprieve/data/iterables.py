"""Passes over loaders that are not a plain DataLoader.

    IndexedPass    a list of batches or another sequence: resumes at the index
    StatefulPass   a loader with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader
    ReplayedPass   any other iterable: its items are read again and dropped

`IterableSource` picks the kind of pass.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from reprieve.data import hf_streams
from reprieve.data.base import BeforeFirstFetch, Pass
from reprieve.data.dataset_proxies import is_stateful
from reprieve.data.loader_rng import LoaderRng, restore_global
from reprieve.data.positions import LoaderPosition, PassPosition
from reprieve.data.redistribution import SampleRedistribution
from reprieve.data.replay import NO_STATE, replay
from reprieve.data.workers.processes import end_processes, track_children
from reprieve.rng import capture_rng


class IterableSource:
    """Passes over anything that can be iterated."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.redistribution: SampleRedistribution | None = None
        self.rng = LoaderRng(loader)
        self.restored_rng: Mapping[str, Any] | None = None
        """The loader's own generators in the interrupted process."""
        self.children: weakref.WeakSet[BaseProcess] = weakref.WeakSet()

    def start(self, saved: PassPosition | None, before_first_fetch: BeforeFirstFetch | None) -> Pass:
        if isinstance(self.loader, Sequence) or not hasattr(self.loader, "__iter__"):
            return IndexedPass(self, saved, before_first_fetch)
        why_inexact = hf_streams.why_inexact(getattr(self.loader, "dataset", None))
        if why_inexact is not None or not is_stateful(self.loader):
            return ReplayedPass(self, saved, before_first_fetch, why_inexact or NO_STATE)
        return StatefulPass(self, saved, before_first_fetch, "has saved no position of its own")

    def position(self) -> LoaderPosition:
        return LoaderPosition(**self.rng.capture_own())

    def restore(self, position: LoaderPosition) -> None:
        self.restored_rng = position.own_rng
        self.rng.restore_own(position.own_rng)

    def end_workers(self) -> None:
        end_processes(list(self.children), lambda: None)


class _IterablePass(Pass):
    """A pass over the loader's own iterator."""

    def __init__(
        self, source: IterableSource, saved: PassPosition | None, before_first_fetch: BeforeFirstFetch | None
    ) -> None:
        super().__init__(saved, before_first_fetch)
        self._source = source
        self._batches: Iterator[Any] = iter(())

    def _fetch(self) -> Any:
        return next(self._batches)

    def _iterate(self) -> None:
        with track_children(self._source.children):
            self._batches = iter(self._source.loader)

    def _restore_rng(self, global_rng: Mapping[str, Any]) -> None:
        """Restore the generators after the position was sought: the global ones as they were before that."""
        restore_global(global_rng)
        if self._source.restored_rng is not None:
            self._source.rng.restore_generators(self._source.restored_rng)

    def close(self) -> None:
        super().close()
        self._batches = iter(())


class IndexedPass(_IterablePass):
    """A pass over a sequence."""

    def _begin(self) -> None:
        pass

    def _fetch(self) -> Any:
        try:
            return self._source.loader[self._yielded]
        except IndexError:
            raise StopIteration from None


class ReplayedPass(_IterablePass):
    """A pass that is replayed from its start to reach a position."""

    def __init__(
        self,
        source: IterableSource,
        saved: PassPosition | None,
        before_first_fetch: BeforeFirstFetch | None,
        replay_reason: str,
    ) -> None:
        super().__init__(source, saved, before_first_fetch)
        self._replay_reason = replay_reason

    def _begin(self) -> None:
        global_rng = capture_rng({})
        if self._saved.start_rng is not None:
            self._source.rng.restore(self._saved.start_rng)
        self._start_rng: Mapping[str, Any] = self._source.rng.capture()
        self._iterate()
        if self._yielded:
            replay(self._batches, self._yielded, type(self._source.loader).__name__, self._replay_reason)
            self._restore_rng(global_rng)

    def _position(self) -> PassPosition:
        return PassPosition(start_rng=self._start_rng)


class StatefulPass(ReplayedPass):
    """A pass over a loader that saves its own position. It is replayed if the loader cannot load that."""

    _state_at_mark: Any = None
    """The loader's state at the last mark, if the loader is further now."""
    _unproven_fetches = 0
    """How many more fetches may find that the loaded state does not fit: the first one of each worker."""

    def _begin(self) -> None:
        if self._saved.loader_state is None:
            super()._begin()
            return
        global_rng = capture_rng({})
        # Checkpoints of earlier versions have no `start_rng`.
        self._start_rng = self._saved.start_rng if self._saved.start_rng is not None else global_rng
        self._unproven_fetches = max(1, getattr(self._source.loader, "num_workers", 0))
        self._position_before = hf_streams.loaded_position(self._dataset)
        try:
            self._source.loader.load_state_dict(self._saved.loader_state)
            self._iterate()
        except Exception as error:  # noqa: BLE001 - whatever a dataset raises
            self._replay_after(error)
        if self._yielded:
            self._restore_rng(global_rng)

    def _fetch(self) -> Any:
        if self._yielded == self._marked:
            self._state_at_mark = self._source.loader.state_dict()
        if not self._unproven_fetches:
            return super()._fetch()
        self._unproven_fetches -= 1
        try:
            return super()._fetch()
        except StopIteration:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a dataset raises
            self._replay_after(error)
            return super()._fetch()
        finally:
            hf_streams.set_loaded_position(self._dataset, self._position_before)

    def _replay_after(self, error: Exception) -> None:
        """Replay the pass from its start, because the loader could not load its state."""
        self._unproven_fetches = 0
        hf_streams.set_loaded_position(self._dataset, self._position_before)
        self._replay_reason = f"cannot load the state that it saved ({type(error).__name__}: {error})"
        self._saved = replace(self._saved, loader_state=None)
        with contextlib.suppress(Exception):
            self._source.loader.load_state_dict({})  # torchdata's loader: as if no state had been loaded
        super()._begin()

    @property
    def _dataset(self) -> Any:
        return getattr(self._source.loader, "dataset", None)

    def _position(self) -> PassPosition:
        if hf_streams.is_stream(self._dataset) and self._marked < getattr(self._source.loader, "num_workers", 0):
            # While one worker has yielded nothing, such a stream reports that for all workers.
            return super()._position()
        is_past = self._yielded != self._marked and self._state_at_mark is not None
        state = self._state_at_mark if is_past else self._source.loader.state_dict()
        return replace(super()._position(), loader_state=state)
