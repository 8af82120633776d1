"""Where a run is: steps, epoch, and the position in each pass over data. Saved with every checkpoint, by every rank.

The calls of `batches` within an epoch are told apart by their order: after a resume the first call goes on with the
first pass of the interrupted epoch, the second with the second, and so on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reprieve.data.resumable_loader import Pass, ResumableLoader

log = logging.getLogger("reprieve")


class SuspendedPass:
    """In place of a pass while a batch is lent."""

    def mark(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        raise AssertionError("nothing is saved while a batch is lent")

    def close(self) -> None:
        pass


@dataclass(slots=True)
class DataPass:
    """A call of `batches`."""

    source: int
    going: Pass | SuspendedPass | None = None
    """None: complete, or left."""
    left: dict[str, Any] | None = None
    """Where it was left before its end."""
    batch: int = 0
    """How many batches of it were given out."""
    marked: int = 0
    """How many of these belong to completed steps."""


@dataclass(slots=True)
class LoopPosition:
    """Of this process, now."""

    steps: int = 0
    epoch: int = 0
    finished: list[int | None] | None = None
    """What was asked for (epochs and steps), once it is done."""
    passes: list[DataPass] = field(default_factory=list)
    """Of this epoch, in the order of the calls."""
    sources: list[ResumableLoader] = field(default_factory=list)
    """In the order in which they were first used."""
    resumed_passes: list[Mapping[str, Any]] = field(default_factory=list)
    """Passes of the interrupted epoch that were not called again yet."""
    _resumed_sources: list[Mapping[str, Any]] = field(default_factory=list)
    _loaders: list[Any] = field(default_factory=list)

    @property
    def going(self) -> list[DataPass]:
        return [one for one in self.passes if one.going is not None]

    def source(self, loader: Any) -> int:
        """The number of the source for this loader; made at its first use."""
        for number, known in enumerate(self._loaders):
            if known is loader:
                return number
        self._loaders.append(loader)
        self.sources.append(ResumableLoader(loader))
        number = len(self.sources) - 1
        self.restore_source(number)
        return number

    def restore_source(self, number: int) -> None:
        """As the interrupted process had it."""
        if number < len(self._resumed_sources):
            self.sources[number].restore(self._resumed_sources[number])

    def step_ended(self) -> bool:
        """Is a pass going on?"""
        self.steps += 1
        going = False
        for one in self.passes:
            if one.going is not None:
                one.going.mark()
                one.marked = one.batch
                going = True
        return going

    def epochs_done(self) -> float | None:
        """None: nobody knows, in the middle of one."""
        if not (going := self.going):
            return float(self.epoch)
        try:
            return self.epoch + min(1.0, going[0].batch / max(1, len(self._loaders[going[0].source])))
        except TypeError:  # it does not know its length
            return None

    def next_epoch(self) -> None:
        self.epoch += 1
        self.passes = []
        self.resumed_passes = []

    def state(self, world_size: int) -> dict[str, Any]:
        """At the last completed step."""
        return {
            "steps": self.steps,
            "epoch": self.epoch,
            "world_size": world_size,
            "passes": [
                {"batch": one.marked, "state": one.left if one.going is None else one.going.state()}
                for one in self.passes
            ],
            "sources": [source.state() for source in self.sources],
        }

    def restore(self, state: Mapping[str, Any], world_size: int) -> None:
        self.steps = state["steps"]
        self.epoch = state["epoch"]
        self.passes = []
        self.resumed_passes = list(state["passes"])
        self._resumed_sources = list(state["sources"])
        if state["world_size"] != world_size:
            self._divide_anew(state["world_size"], world_size)

    def _divide_anew(self, before: int, now: int) -> None:
        """Another number of ranks: as many samples of each pass are behind us as before, in the order that
        DistributedSampler deals them out."""
        log.warning(
            "the checkpoint was written by %d ranks, these are %d: the run goes on at the same place in the data, but "
            "no longer bit for bit as it would have (random numbers and batches of each rank are others)",
            before,
            now,
        )
        self._resumed_sources = []
        self.resumed_passes = [
            one if one["state"] is None else {"batch": count, "state": {"consumed": count}}
            for one in self.resumed_passes
            for count in [one["batch"] * before // now]
        ]
