"""Runs the saves of one process, one at a time: agree on a plan, stage or write it, prune afterwards.

The training thread is blocked while the state is copied (a background save) or until it is durable (any other).
Writing and commit of a background save, and pruning after any save, happen on a thread of their own. The stages of a
single save are in `SaveJob`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.buffers.staging import StagingBuffers
from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.folder.lease import FolderLease, LeaseView
from reprieve.checkpoint.folder.pruning import Pruner
from reprieve.checkpoint.folder.storage_errors import explained
from reprieve.checkpoint.format.layout import FileLayout
from reprieve.checkpoint.save.background import Background
from reprieve.checkpoint.save.decision import SaveDecision, decide_on_existing
from reprieve.checkpoint.save.job import PlanSummary, SaveJob
from reprieve.checkpoint.save.planner import Planner
from reprieve.checkpoint.save.request import SaveRequest, check_same_step
from reprieve.checkpoint.save.result import Save
from reprieve.checkpoint.save.throughput import SaveThroughput
from reprieve.clock import Clock
from reprieve.ranks.group import Ranks
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

Progress = Callable[[int], None]
"""Called with each number of bytes that was moved, from any thread."""


@dataclass(slots=True)
class _Proposal:
    """This rank's part in the agreement on a save; `job` carries the save out if all ranks agree."""

    step: int
    decide: Callable[[], SaveDecision]
    make_job: Callable[[], SaveJob]
    job: SaveJob | None = None

    def describe(self) -> dict[str, Any]:
        decision = self.decide()
        if decision.skip is None:
            self.job = self.make_job()
        summary = self.job.summary() if self.job is not None else None
        return {"step": self.step, "decision": asdict(decision), "summary": summary and asdict(summary)}


class Saver:
    """The saves of one process into one checkpoint folder."""

    def __init__(
        self,
        disk: Disk,
        root: Path,
        lease: LeaseView,
        ranks: Ranks,
        clock: Clock,
        *,
        planner: Planner,
        pool: BlockPool,
        pruner: Pruner,
        checkpoint_bytes: int,
        skip_when_busy: bool,
    ) -> None:
        self._disk = disk
        self._root = root
        self._lease = lease
        self._ranks = ranks
        self._clock = clock
        self._planner = planner
        self._pool = pool
        self._pruner = pruner
        self._skip_when_busy = skip_when_busy
        self._saved: set[Path] = set()
        self._saves = 0
        self.staging = StagingBuffers(pool)
        self.background = Background()
        self.throughput = SaveThroughput(clock)
        self.checkpoint_bytes = checkpoint_bytes
        """The size of the last save; before the first one, of the state at the start."""
        self.resumed_from: str | None = None
        """The name of the checkpoint that was restored: the parent of those saved from here on."""

    def save(self, request: SaveRequest, *, background: bool, progress: Progress | None) -> Save:
        """Save the state. Durable on return; with `background`, once the returned save's `wait()` returns."""
        start = self._clock.monotonic()
        target = paths.checkpoint(self._root, request.step)
        may_skip = background and self._skip_when_busy
        if not may_skip:
            self._wait_for_save(request.step)
        files = request.extra_files()
        proposal = _Proposal(
            request.step,
            decide=partial(self._decide, target, request, may_skip),
            make_job=partial(self._make_job, request, files, progress),
        )
        with self.background.own_error_first():
            proposals = self._ranks.agree("plan", proposal.describe)
        check_same_step([each["step"] for each in proposals])
        decision = SaveDecision(**proposals[0]["decision"])
        if decision.skip is not None:
            return Save(request.step, target, skipped=decision.skip)
        self._wait_for_save(request.step)
        job = proposal.job
        assert job is not None
        summaries = [PlanSummary(**each["summary"]) for each in proposals if each["summary"] is not None]
        job.begin(summaries, decision, partial(self._make_room, is_last=request.is_last))
        self.checkpoint_bytes = job.plan.bytes
        self.throughput.begin(request.step, self.checkpoint_bytes, self._ranks.world_size)
        save = Save(request.step, target, job.plan.bytes, diverged=job.diverged)
        if background and self.staging.has_room(job.plan.blocks):
            job.stage()
            save.pending = self.background.write(partial(self._finish, job, target))
        else:
            with self._pruner.giving_way(request.step):
                self._finish(job, target)
        save.blocked = timedelta(seconds=self._clock.monotonic() - start)
        if self._ranks.rank == 0 and not request.is_last:
            self.background.submit(self._prune)
        return save

    def _wait_for_save(self, step: int) -> None:
        if self.background.writing:
            log.info("the save at step %d waits for the one before it", step)
            self.background.wait_for_save()

    def _decide(self, target: Path, request: SaveRequest, may_skip: bool) -> SaveDecision:
        self.background.raise_errors()
        if self._ranks.rank != 0:
            return SaveDecision()
        self._lease.check()  # what is there may be a newer attempt's
        if may_skip and self.background.writing:
            log.warning("the save at step %d is skipped: the one before it is still being written", request.step)
            return SaveDecision(skip="another save was still running")
        return decide_on_existing(
            target,
            self._lease.run,
            self._pool,
            replace=request.replace,
            was_saved=target in self._saved,
            was_restored=target.name == self.resumed_from,
        )

    def _make_job(self, request: SaveRequest, files: Sequence[FileLayout], progress: Progress | None) -> SaveJob:
        self._saves += 1
        created = datetime.fromtimestamp(self._clock.time(), timezone.utc)
        manifest = request.manifest(
            created,
            self._lease,
            self._ranks,
            parent=self.resumed_from,
            state=self._planner.state.names,
            number=self._pruner.created + 1,
        )
        return SaveJob(
            self._disk,
            self._pool,
            self._ranks,
            self._lease,
            root=self._root,
            folder=paths.saving(self._root, request.step, self._lease.attempt),
            plan=self._planner.plan(request.values, files),
            manifest=manifest,
            number=self._saves,
            progress=self.throughput.counting(progress),
        )

    def _make_room(self, needed: int, *, is_last: bool) -> None:
        """Raise StorageFull unless `needed` bytes fit, after pruning if that is necessary."""
        self._pruner.make_room(needed, prune=lambda: self.background.run_now(self._prune))
        if not is_last:
            self._pruner.recheck_space(needed)

    def _finish(self, job: SaveJob, target: Path) -> None:
        with self.throughput:
            job.finish()
        self._saved.add(target)
        self._pruner.saved(paths.step_of(target))

    def _prune(self) -> None:
        assert isinstance(self._lease, FolderLease)
        with explained(self._root):
            self._pruner.prune(self._lease)
