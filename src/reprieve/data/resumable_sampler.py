"""Which samples come next: stands in a DataLoader for its sampler, and can go on in the middle of a pass.

To get to batch k the user's own sampler is run from the random numbers it had at the start of the pass, and its
first k batches of indices are passed over: no sample is read. So any sampler works that is a function of its state and
of the random numbers at its start. (One that draws from the global generators at each index cannot be sought.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any


class Placeholder:
    """In place of an index: the worker that gets it answers at once, with nothing. So the batch behind it goes to the
    worker that it would have gone to. As a batch of indices it has one element, itself."""

    def __iter__(self) -> Iterator[Placeholder]:
        yield self

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True)
class SkipPlan:
    """What to do before the first index of a pass."""

    skip: int = 0
    """Batches that are consumed."""
    blanks: int = 0
    """How many workers have had their turn since worker 0."""
    draw: bool = False
    """The first batch of indices is asked for as well, so that the order is drawn."""
    begin: Callable[[], None] | None = None
    """Sets the random numbers that the sampler starts from; None: they are set."""


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
        """Now, and not when the first index is asked for."""
        assert self._newest is not None
        self._newest.follow_plan()


class _SamplerIterator:
    def __init__(self, indices: ResumableSampler) -> None:
        self._indices = indices
        # At once and not at the first index, because torch does it now, and it may draw random numbers.
        self._inner: Iterator[Any] = iter(indices.inner)
        self._blanks = 0

    def __iter__(self) -> _SamplerIterator:
        return self

    def __next__(self) -> Any:
        if self._indices.plan is not None:
            self.follow_plan()
        if self._blanks:
            self._blanks -= 1
            return Placeholder()
        return next(self._inner)

    def follow_plan(self) -> None:
        plan, self._indices.plan = self._indices.plan, None
        if plan is None:
            return
        if plan.begin is not None:
            plan.begin()
            self._inner = iter(self._indices.inner)
        deque(islice(self._inner, plan.skip), maxlen=0)
        if plan.draw:
            self._inner = chain(list(islice(self._inner, 1)), self._inner)
        self._blanks = plan.blanks
