"""A loader as something that can be left and entered again: the entrance to this package.

    source = ResumableLoader(loader)               one for each loader, as long as the run lives
    source.restore(source_state)              only after a resume
    for batch in (one := source.start(pass_state)):
        …
        one.mark()                            what was yielded is consumed
        save(one.state(), source.state())     both at the same moment

Batches and random numbers are those of the bare loader, bit for bit, resumed or not, and the position is sought, not
replayed. Not exact can be: a sampler, or without workers an iterable dataset without state_dict, that draws from the
global generators all along; `in_order=False`; with persistent workers, a pass after one that was left before its end,
or in which an iterable dataset drew after its last batch (say for samples that drop_last drops).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprieve.data.accelerate_loader import AccelerateLoaderSource, is_prepared
from reprieve.data.base import BatchSource, Enter, Pass
from reprieve.data.dataset_proxies import is_stateful
from reprieve.data.iterables import IterableSource
from reprieve.data.torch_loader import TorchLoaderSource, is_plain_loader

__all__ = ["Pass", "ResumableLoader"]


class ResumableLoader:
    """Passes over one loader."""

    def __init__(self, loader: Any) -> None:
        self._source: BatchSource
        if is_prepared(loader) and is_plain_loader(loader.base_dataloader) and not is_stateful(loader.base_dataloader):
            self._source = AccelerateLoaderSource(loader)
        elif not is_prepared(loader) and is_plain_loader(loader) and not is_stateful(loader):
            self._source = TorchLoaderSource(loader)
        else:
            self._source = IterableSource(loader)

    def start(self, saved: Mapping[str, Any] | None = None, *, enter: Enter | None = None) -> Pass:
        """A pass from the beginning, or from the position that `Pass.state` gave. `enter` puts the global random
        numbers to where the interrupted process had them; it is called once, before the first fetch."""
        return self._source.start(saved, enter)

    def state(self) -> dict[str, Any]:
        """What the next pass depends on, besides a position in it: the loader's generators, persistent workers."""
        return self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Before the first `start`, to what `state` gave."""
        self._source.restore(state)

    def deal_again(self, position: Mapping[str, Any], multiple: int) -> dict[str, Any] | None:
        """What is left of a pass whose batches were others, of another size or for another number of ranks: dealt out
        in those of this loader, each sample once. The number of its first is a multiple of `multiple`. None: how the
        batches are made is not known."""
        dealing = self._source.dealing
        return None if dealing is None else dealing.again(position, multiple)

    def length(self, position: Mapping[str, Any]) -> int | None:
        """Of a pass that was dealt out again: how many batches, those before it counted in. None: nobody knows."""
        dealing = self._source.dealing
        return None if dealing is None else dealing.length(position)

    def end_workers(self) -> None:
        """End workers that are still there: asked first, killed after a second. For the end of a process."""
        self._source.end_workers()
