"""The trainer's loader, entered again where it was left: sought, not replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import trainer as stock

from reprieve.adapters.transformers.patching import replaced
from reprieve.data.resumable_loader import Pass, ResumableLoader


class ResumableDataLoader:
    """Stands for the loader that Hugging Face made, and gives out its batches through a `ResumableLoader`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._source = ResumableLoader(loader)
        self._position: Mapping[str, Any] | None = None
        self._enter: Callable[[], None] | None = None
        self._going: Pass | None = None

    def restore(self, source: Mapping[str, Any]) -> None:
        """The loader's own state, as the interrupted process had it."""
        self._source.restore(source)

    def go_on(self, position: Mapping[str, Any] | None, enter: Callable[[], None]) -> None:
        """The next pass is the one that was left. `enter` puts the random numbers back, before its first batch."""
        self._position, self._enter = position, enter

    def skip(self, count: int) -> ResumableDataLoader:
        """As a stock checkpoint has it, which knows no more than how many batches are done."""
        if self._position is None:
            self._position = {"consumed": count}
        return self

    def deal_again(self, position: Mapping[str, Any], multiple: int) -> dict[str, Any] | None:
        return self._source.deal_again(position, multiple)

    def length(self, position: Mapping[str, Any]) -> int | None:
        return self._source.length(position)

    def mark(self) -> None:
        """What was given out belongs to completed steps."""
        if self._going is not None:
            self._going.mark()

    @property
    def position(self) -> dict[str, Any]:
        """In the pass that is going on, at the last mark; or that is about to."""
        if self._position is not None or self._going is None:
            return dict(self._position or {"consumed": 0})
        return self._going.state()

    def state(self) -> dict[str, Any]:
        return self._source.state()

    def end_workers(self) -> None:
        self._source.end_workers()

    def __iter__(self) -> Iterator[Any]:
        if self._going is not None:
            self._going.close()
        position, enter = self._position, self._enter
        self._position = self._enter = None
        self._going = self._source.start(position, enter=enter)
        return self._going

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)


@contextlib.contextmanager
def sought(args: Any) -> Iterator[None]:
    """Hugging Face skips the batches that are behind by taking a loader apart, which takes long: `ignore_data_skip` is
    for those who do not want to wait. Ours knows where it has to go, and nobody has to."""
    real = stock.skip_first_batches  # type: ignore[attr-defined]

    def skip_first_batches(loader: Any, count: int = 0) -> Any:
        return loader.skip(count) if isinstance(loader, ResumableDataLoader) else real(loader, count)

    asked, args.ignore_data_skip = args.ignore_data_skip, False
    try:
        with replaced(stock, "skip_first_batches", skip_first_batches):
            yield
    finally:
        args.ignore_data_skip = asked
