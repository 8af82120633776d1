"""The state of a plain loop, as a checkpoint stores it for every rank under `values["loop"]`.

`LoopAdapter.capture` builds it at a save; `Run` reads it on resume. docs/format.md describes the stored form.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reprieve.errors import StateMismatch

log = logging.getLogger("reprieve")

_VERSION = 1
"""A checkpoint without a version has the fields of version 1."""


@dataclass(frozen=True, slots=True)
class PassState:
    """The position in one pass over a loader, at the last completed step."""

    batch: int
    """Batches that belong to completed steps."""
    state: Mapping[str, Any] | None
    """The position as `reprieve.data` describes it, or None if the pass is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Everything that continues a loop at the next batch, on one rank."""

    steps: int
    epoch: int
    world_size: int
    passes: Sequence[PassState]
    """The passes of the current epoch, in the order of the calls of `batches`."""
    sources: Sequence[Mapping[str, Any]]
    """The state of each loader between passes, in the order of first use."""
    tail: bool
    """The rest of the loop's body, after `step`, still has to run for the last step: the stop was in an evaluation."""
    metrics: Mapping[str, float]
    """This rank's metrics. The manifest has those of rank 0."""
    ddp: Mapping[str, Sequence[str]]
    """The order of gradient buckets, by the name of the DDP module."""

    def to_state(self) -> dict[str, Any]:
        """Return plain types that `torch.load(weights_only=True)` loads."""
        return {
            "version": _VERSION,
            "steps": self.steps,
            "epoch": self.epoch,
            "world_size": self.world_size,
            "passes": [{"batch": data_pass.batch, "state": data_pass.state} for data_pass in self.passes],
            "sources": list(self.sources),
            "tail": self.tail,
            "metrics": dict(self.metrics),
            "ddp": {name: list(order) for name, order in self.ddp.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LoopState:
        """Read what `to_state` returned, in this version of Reprieve or an earlier one."""
        if (version := state.get("version", _VERSION)) != _VERSION:
            raise StateMismatch(
                f"the checkpoint stores the state of the loop in version {version}, and this version of Reprieve reads "
                f"version {_VERSION}: resume with the version of Reprieve that wrote the checkpoint, or a newer one"
            )
        try:
            return cls(
                steps=state["steps"],
                epoch=state["epoch"],
                world_size=state["world_size"],
                passes=[PassState(data_pass["batch"], data_pass["state"]) for data_pass in state["passes"]],
                sources=state["sources"],
                tail=state["tail"],
                metrics=state["metrics"],
                ddp=state["ddp"],
            )
        except KeyError as error:
            raise StateMismatch(f"the checkpoint's state of the loop has no {error}: verify the checkpoint") from error

    def for_world_size(self, world_size: int) -> LoopState:
        """Return the same position for another number of ranks.

        DistributedSampler hands out samples in turn, so n batches of each of `self.world_size` ranks are
        n * self.world_size / world_size batches of each rank now.
        """
        if world_size == self.world_size:
            return self
        log.warning(
            "the checkpoint was written by %d ranks, and this run has %d: it resumes at the same position in the data, "
            "but no longer bit for bit, because the random numbers and batches of each rank differ",
            self.world_size,
            world_size,
        )
        return replace(
            self,
            world_size=world_size,
            sources=[],
            passes=[
                data_pass if data_pass.state is None else PassState(count, {"consumed": count})
                for data_pass in self.passes
                for count in [data_pass.batch * self.world_size // world_size]
            ],
        )
