"""A sampler that can resume in the middle of a pass. It takes the place of a DataLoader's sampler.

To reach batch k, the user's own sampler runs from the random numbers that it had at the start of the pass, and its
first k batches of indices are skipped: no sample is read. So any sampler works that is a function of its state and of
the random numbers at its start. (A sampler that draws from the global generators at each index cannot be sought.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any


class Placeholder:
    """Takes the place of an index. The worker that gets it returns it at once, so that the next batch goes to the same
    worker as in an undisturbed run. As a batch of indices it has one element, itself."""

    def __iter__(self) -> Iterator[Placeholder]:
        yield self

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True)
class SkipPlan:
    """What a sampler does before the first index of a pass."""

    skip: int = 0
    """Consumed batches."""
    placeholders: int = 0
    """How many workers, from worker 0 on, have made a batch in the current round."""
    draw_order: bool = False
    """Take the first batch of indices at once, so that the sampler draws its order."""
    restore_start: Callable[[], None] | None = None
    """Restores the random numbers that the sampler starts from. None: they are in place."""


class ResumableSampler:
    """The sampler (or batch sampler) that a DataLoader sees. `inner` is the user's."""

    def __init__(self) -> None:
        self.inner: Any = None
        self.plan: SkipPlan | None = None
        self._newest: _SamplerIterator | None = None

    def __iter__(self) -> _SamplerIterator:
        self._newest = _SamplerIterator(self)
        return self._newest

    def __len__(self) -> int:
        return len(self.inner)

    def follow_plan(self) -> None:
        """Follow the plan now, and not when the first index is requested."""
        assert self._newest is not None
        self._newest.follow_plan()


class _SamplerIterator:
    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler
        # Now and not at the first index: torch does so too, and the sampler may draw random numbers here.
        self._inner: Iterator[Any] = iter(sampler.inner)
        self._placeholders = 0

    def __iter__(self) -> _SamplerIterator:
        return self

    def __next__(self) -> Any:
        if self._sampler.plan is not None:
            self.follow_plan()
        if self._placeholders:
            self._placeholders -= 1
            return Placeholder()
        return next(self._inner)

    def follow_plan(self) -> None:
        plan, self._sampler.plan = self._sampler.plan, None
        if plan is None:
            return
        if plan.restore_start is not None:
            plan.restore_start()
            self._inner = iter(self._sampler.inner)
        deque(islice(self._inner, plan.skip), maxlen=0)
        if plan.draw_order:
            self._inner = chain(list(islice(self._inner, 1)), self._inner)
        self._placeholders = plan.placeholders
