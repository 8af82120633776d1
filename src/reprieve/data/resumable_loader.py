"""A loader whose passes can be interrupted and resumed: the entry to this package.

    source = ResumableLoader(loader)                   one for each loader, as long as the run lives
    source.restore(loader_state)                       only after a resume
    for batch in (batches := source.start(pass_state)):
        …
        batches.mark()                                 the batches yielded so far are consumed
        save(batches.state(), source.state())          both at the same point of the loop

Batches and random numbers are those of the bare loader, bit for bit, resumed or not. The position is sought, not
replayed. Resuming may be inexact with:
  - a sampler that draws from the global generators throughout the pass
  - an iterable dataset without `state_dict` that does so in the main process
  - `in_order=False`
  - persistent workers, in a pass after one that was left before its end, or in which an iterable dataset drew random
    numbers after its last batch (for samples that `drop_last` drops, for example)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprieve.data.accelerate_loader import AccelerateLoaderSource, is_prepared
from reprieve.data.base import BatchSource, BeforeFirstFetch, Pass
from reprieve.data.dataset_proxies import is_stateful
from reprieve.data.iterables import IterableSource
from reprieve.data.positions import LoaderPosition, PassPosition
from reprieve.data.torch_loader import TorchLoaderSource, is_plain_loader

__all__ = ["Pass", "ResumableLoader"]


class ResumableLoader:
    """Passes over one loader. Positions come in and go out as plain dicts, as checkpoints hold them."""

    def __init__(self, loader: Any) -> None:
        self._source: BatchSource
        if is_prepared(loader) and is_plain_loader(loader.base_dataloader) and not is_stateful(loader.base_dataloader):
            self._source = AccelerateLoaderSource(loader)
        elif not is_prepared(loader) and is_plain_loader(loader) and not is_stateful(loader):
            self._source = TorchLoaderSource(loader)
        else:
            self._source = IterableSource(loader)

    def start(
        self, saved: Mapping[str, Any] | None = None, *, before_first_fetch: BeforeFirstFetch | None = None
    ) -> Pass:
        """Start a pass at its beginning, or at a position that `Pass.state` returned. `before_first_fetch` restores
        the global random number generators of the interrupted process; it is called once."""
        return self._source.start(PassPosition.from_state(saved) if saved else None, before_first_fetch)

    def state(self) -> dict[str, Any]:
        """Return what the next pass depends on, besides a position in it: the loader's generators, its persistent
        workers."""
        return self._source.position().to_state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. To be called before the first `start`."""
        self._source.restore(LoaderPosition.from_state(state))

    def redistribute(self, position: Mapping[str, Any], multiple: int) -> dict[str, Any] | None:
        """Convert a position in batches of another size, or for another number of ranks, to batches of this loader:
        each remaining sample comes once. The number of the first batch is a multiple of `multiple`. Returns None if
        it is unknown how the batches are made."""
        if self._source.redistribution is None:
            return None
        found = self._source.redistribution.redistribute(PassPosition.from_state(position), multiple)
        return None if found is None else found.to_state()

    def length(self, position: Mapping[str, Any]) -> int | None:
        """Return the number of batches of a redistributed pass, including the consumed ones. None: unknown."""
        redistribution = self._source.redistribution
        return None if redistribution is None else redistribution.length(PassPosition.from_state(position))

    def end_workers(self) -> None:
        """End the workers that still run, and kill them after a second. For the end of a process."""
        self._source.end_workers()
