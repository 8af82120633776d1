"""Plans the saves of one training state, and refuses state that could be saved but not loaded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprieve.checkpoint.format.layout import FileLayout
from reprieve.checkpoint.save.plan import SHARD_BYTES, Plan, plan
from reprieve.checkpoint.save.weights_only_check import check_loadable
from reprieve.checkpoint.state.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """What every save of a process has in common."""

    state: State
    rng: bool = True
    """Save the global random number generators."""
    shard_bytes: int = SHARD_BYTES
    rank: int = 0
    world_size: int = 1

    def plan(self, values: Mapping[str, Any] | None = None, extra_files: Sequence[FileLayout] = ()) -> Plan:
        """Plan a save of the state as it is now; UnsafeState if it could not be loaded again."""
        the_plan = plan(
            self.state,
            values,
            extra_files=extra_files,
            rng=self.rng,
            shard_bytes=self.shard_bytes,
            rank=self.rank,
            world_size=self.world_size,
        )
        check_loadable(the_plan)
        return the_plan
