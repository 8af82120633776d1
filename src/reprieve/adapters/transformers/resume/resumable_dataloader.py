"""The trainer's DataLoader, which resumes at a position by seeking instead of replaying batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import trainer as stock

from reprieve.adapters.transformers.patching import patched
from reprieve.data.resumable_loader import Pass, ResumableLoader


class ResumableDataLoader:
    """A stand-in for the DataLoader that Hugging Face made. It yields that loader's batches, and can be re-entered."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._source = ResumableLoader(loader)
        self._next_position: Mapping[str, Any] | None = None
        """Where the next pass starts; None: at its beginning."""
        self._restore_rng: Callable[[], None] | None = None
        self._pass: Pass | None = None
        """The pass that is running, or the last one."""

    def restore(self, loader_state: Mapping[str, Any]) -> None:
        """Restore the loader's own state from the interrupted process."""
        self._source.restore(loader_state)

    def resume_at(self, position: Mapping[str, Any] | None, restore_rng: Callable[[], None] | None = None) -> None:
        """Start the next pass at this position. It calls `restore_rng` once, before its first batch."""
        self._next_position, self._restore_rng = position, restore_rng

    def skip(self, count: int) -> ResumableDataLoader:
        """Start the next pass after `count` batches, unless its position is known: stock checkpoints have no more."""
        if self._next_position is None:
            self._next_position = {"consumed": count}
        return self

    def redistribute(self, position: Mapping[str, Any], multiple: int) -> dict[str, Any] | None:
        return self._source.redistribute(position, multiple)

    def length(self, position: Mapping[str, Any]) -> int | None:
        return self._source.length(position)

    def mark(self) -> None:
        """Note that all batches yielded so far belong to completed steps."""
        if self._pass is not None:
            self._pass.mark()

    @property
    def position(self) -> dict[str, Any]:
        """The position at the last mark of the running pass, or the start of the next one."""
        if self._next_position is not None or self._pass is None:
            return dict(self._next_position or {"consumed": 0})
        return self._pass.state()

    def state(self) -> dict[str, Any]:
        return self._source.state()

    def end_workers(self) -> None:
        self._source.end_workers()

    def __iter__(self) -> Iterator[Any]:
        if self._pass is not None:
            self._pass.close()
        position, restore_rng = self._next_position, self._restore_rng
        self._next_position = self._restore_rng = None
        self._pass = self._source.start(position, before_first_fetch=restore_rng)
        return self._pass

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)


@contextlib.contextmanager
def seek_instead_of_skip(args: Any) -> Iterator[None]:
    """Have the trainer seek to the first batch, also with `ignore_data_skip`.

    Hugging Face skips batches by reading them, which takes long: `ignore_data_skip` is for scripts that do not want to
    wait and accept other data. A `ResumableDataLoader` knows its position, so no script has to choose.
    """
    original = stock.skip_first_batches  # type: ignore[attr-defined]

    def skip_first_batches(loader: Any, count: int = 0) -> Any:
        return loader.skip(count) if isinstance(loader, ResumableDataLoader) else original(loader, count)

    ignore_data_skip, args.ignore_data_skip = args.ignore_data_skip, False
    try:
        with patched(stock, "skip_first_batches", skip_first_batches):
            yield
    finally:
        args.ignore_data_skip = ignore_data_skip
