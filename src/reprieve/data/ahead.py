"""Passes over a loader that accelerate has prepared.

It holds the real DataLoader as `base_dataloader`, and fetches one batch ahead to know which one is the last. A pass
iterates a copy of it whose `base_dataloader` gives our own pass over the real one: what accelerate does with batches
(device, epochs, gradient state) is done by accelerate. Recognised by its attributes: accelerate is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reprieve.data.loader import LoaderPass, LoaderSource
from reprieve.data.passes import Enter, Pass
from reprieve.errors import ConfigError


def is_prepared(loader: Any) -> bool:
    return "base_dataloader" in getattr(loader, "__dict__", {})


class PreparedSource:
    """One DataLoaderShard (or DataLoaderDispatcher of a single process, or SkipDataLoader)."""

    def __init__(self, loader: Any, ignore: Sequence[int]) -> None:
        if hasattr(type(loader), "_fetch_batches") and loader.state.num_processes > 1:
            raise ConfigError(
                "this loader reads all batches on rank 0 and sends them to the others: it cannot be put to a position. "
                "Prepare it with Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"
            )
        self.loader = loader
        self.counts_epochs = "iteration" in loader.__dict__
        # Those that count epochs are those that fetch ahead.
        self.base = LoaderSource(loader.base_dataloader, ignore, owner=loader, ahead=self.counts_epochs)

    def start(self, saved: Mapping[str, Any] | None, enter: Enter | None) -> PreparedPass:
        return PreparedPass(self, saved, enter)

    def state(self) -> dict[str, Any]:
        state = self.base.state()
        if self.counts_epochs:
            state["iteration"] = self.loader.iteration
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self.base.restore(state)
        if "iteration" in state:
            self.loader.iteration = state["iteration"]

    def end_workers(self) -> None:
        self.base.end_workers()


class PreparedPass(Pass):
    """One pass over it. The pass over the real DataLoader has the position, and calls `enter`."""

    def __init__(self, source: PreparedSource, saved: Mapping[str, Any] | None, enter: Enter | None) -> None:
        super().__init__(saved, None)
        self._source = source
        loader = source.loader
        self._skipped = int(loader.__dict__.get("skip_batches", 0))
        inner = dict(saved) if saved else None
        if inner is not None:
            inner["consumed"] = self._yielded + self._skipped if self._yielded else 0
        self._inner: LoaderPass = source.base.start(inner, enter)
        self._copy = object.__new__(type(loader))
        self._copy.__dict__.update(loader.__dict__)
        self._copy.__dict__["base_dataloader"] = _Base(loader.base_dataloader, self._inner)
        if self._yielded:
            self._copy.__dict__["skip_batches"] = 0
        self._batches: Iterator[Any] = iter(())

    def _begin(self) -> None:
        if "iteration" in self._saved:
            self._source.loader.iteration = self._copy.iteration = self._saved["iteration"]
        if self._saved.get("ended"):
            next(self._inner, None)
            if self._source.counts_epochs:
                self._source.loader.iteration = self._copy.iteration + 1
            return
        self._iteration = self._copy.__dict__.get("iteration")
        self._batches = iter(self._copy)

    def _fetch(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._inner.mark()
            if self._source.counts_epochs and not self._saved.get("ended"):
                self._source.loader.iteration = self._copy.iteration
            raise

    def mark(self) -> None:
        super().mark()
        self._inner.mark()

    def _state(self) -> dict[str, Any]:
        state = self._inner.state()
        del state["consumed"]
        if self._source.counts_epochs:
            state["iteration"] = self._iteration
        return state

    def close(self) -> None:
        super().close()
        self._batches = iter(())
        self._inner.close()


class _Base:
    """In place of the real DataLoader: is taken for it, and gives the batches of our pass."""

    def __init__(self, loader: Any, batches: LoaderPass) -> None:
        self._reprieve = loader, batches

    @property
    def __class__(self) -> Any:
        return self._reprieve[0].__class__

    @__class__.setter
    def __class__(self, other: Any) -> None:
        raise TypeError("not while a pass is running")

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_reprieve")[0], name)

    def __len__(self) -> int:
        return len(self._reprieve[0])

    def __iter__(self) -> LoaderPass:
        return self._reprieve[1]
