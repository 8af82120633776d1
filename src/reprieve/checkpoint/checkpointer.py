"""The engine's front: one object that saves a training state, restores it, and looks after what is on storage.

The flow of a save is in `saving`, the flow of a resume in `resume`; every arrow of them is a module of this folder.
Saves run one at a time. The training thread is blocked while the state is copied (a background save) or until it is
durable (any other); commit and retention of a background save happen on a thread of their own.

In a job of several ranks every rank makes the same calls; rank 0 owns the folder and decides, all confirm.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.checkpoint.buffers.staging import StagingBuffers
from reprieve.checkpoint.coordinated_schedule import CoordinatedSchedule
from reprieve.checkpoint.folder import finished_marker, paths
from reprieve.checkpoint.folder.catalog import CheckpointInfo, list_checkpoints
from reprieve.checkpoint.folder.disk_space import check_room
from reprieve.checkpoint.folder.lease import FolderLease, LeaseRecord, LeaseView, acquire, join
from reprieve.checkpoint.folder.pruning import Pruner
from reprieve.checkpoint.folder.retention import Retention, reading
from reprieve.checkpoint.folder.verify import verify
from reprieve.checkpoint.format.layout import FileLayout
from reprieve.checkpoint.restore import resume
from reprieve.checkpoint.results import Restored, Save
from reprieve.checkpoint.save.background import Background
from reprieve.checkpoint.save.job import SaveJob
from reprieve.checkpoint.save.plan import SHARD_BYTES, Plan, plan
from reprieve.checkpoint.save.request import SaveRequest, check_same_step
from reprieve.checkpoint.save.throughput import SaveInProgress, SaveThroughput
from reprieve.checkpoint.save.weights_only_check import check_loadable
from reprieve.checkpoint.schedule import Every, Schedule
from reprieve.checkpoint.state.fingerprint import parts_of
from reprieve.checkpoint.state.state import State
from reprieve.clock import Clock, SystemClock
from reprieve.errors import ConfigError, InvalidCheckpoint, RankFailed, RanksError, StorageFull
from reprieve.ranks.group import LIMIT, Ranks
from reprieve.storage.disk import Disk, explain
from reprieve.storage.uri import local_path
from reprieve.units import parse_duration, parse_size

log = logging.getLogger("reprieve")

_SEEN_WITHIN = timedelta(seconds=30)
"""How long after rank 0 the others may see what it wrote: the caches of network file systems hold on to names."""
_CLOSE_WITHIN = timedelta(seconds=30)

Progress = Callable[[int], None]
"""Called with each number of bytes that was moved, from any thread."""


class Checkpointer:
    """Saves and restores the objects given by name.

        checkpointer = Checkpointer("checkpoints", model=model, optimizer=optimizer, keep=3, every="10m")
        resumed = checkpointer.restore()                  # None: nothing there, a fresh start
        for step in range(resumed.step if resumed else 0, steps):
            train_one_step()
            checkpointer.save_if_due(step + 1)            # in the background
        checkpointer.save(steps)                          # durable on return
        checkpointer.close()

    `every`: when `save_if_due` saves: 500, "500 steps", "epoch", "10m", a list of them, or None for never.
    `keep`, `keep_every`, `best`, `keep_requested`: what retention keeps, see `Retention`.
    `name`: the run's name; the same name after a restart goes on with the run. Default: `REPRIEVE_RUN`, else the name
        that the folder has already, else a new one.
    `fresh`: start over; checkpoints that are there already are moved to a folder beside them.
    `strict`: a missing or unexpected key on the way back is an error.
    `rng`: save and restore the global random number generators.
    `when_busy`: a background save that comes due while another one runs waits for it ("wait") or is left out ("skip").
    `take_over_after`: how long to wait for an earlier attempt of the same run that is still alive.
    `ranks`: the processes of the job; found out from torchrun or torch.distributed where not given.
    `rank_timeout`: how much later than the first another rank may come to a save or a restore before it fails.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        every: Every = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: tuple[str, str] | None = None,
        keep_requested: bool = False,
        name: str | None = None,
        fresh: bool = False,
        strict: bool = True,
        rng: bool = True,
        when_busy: str = "wait",
        take_over_after: str | float | timedelta = "60s",
        shard_bytes: str | int = SHARD_BYTES,
        rank_timeout: str | float | timedelta = LIMIT,
        ranks: Ranks | None = None,
        disk: Disk | None = None,
        clock: Clock | None = None,
        **state: object,
    ) -> None:
        if when_busy not in ("wait", "skip"):
            raise ConfigError(f'when_busy={when_busy!r}: it is "wait" or "skip"')
        self.root = local_path(uri)
        self.retention = Retention(keep=keep, keep_every=keep_every, best=best, keep_requested=keep_requested)
        self._clock = clock or SystemClock()
        self.schedule = Schedule.of(every, self._clock)
        self._state = State(state)
        self._fresh = fresh
        self._strict = strict
        self._rng = rng
        self._when_busy = when_busy
        self._shard_bytes = parse_size(shard_bytes)
        self._disk = disk or Disk()
        self._parent: str | None = None
        self._pool = BlockPool(pinned=torch.cuda.is_available())
        self._staging = StagingBuffers(self._pool)
        self._background = Background()
        self._throughput = SaveThroughput(self._clock)
        self._pruner = Pruner(self._disk, self.root, self.retention)
        self._saved: set[Path] = set()
        self._closed = self._ending = False
        self._saves = 0
        self._ranks_are_ours = ranks is None
        self._ranks = ranks if ranks is not None else Ranks.detect(parse_duration(rank_timeout))
        self._lease = self._join_run(name or os.environ.get("REPRIEVE_RUN") or None, parse_duration(take_over_after))
        self._ranks = self._ranks.scoped(f"{self.run_name}/{self.attempt}")
        self._coordinated = CoordinatedSchedule(self.schedule, self._ranks)

    def _join_run(self, run: str | None, wait: timedelta) -> LeaseView:
        """Rank 0 becomes the owner of the folder, for all ranks."""
        mine: FolderLease | None = None

        def own() -> dict[str, Any]:
            nonlocal mine
            first_plan = self._plan()
            self._bytes = first_plan.bytes
            if self._ranks.rank != 0:
                return {}
            with self._explained():
                resume.make_root(self._disk, self.root)
                mine = acquire(self._disk, self.root, run, wait=wait, clock=self._clock)
                resume.clean_up(self._disk, self.root, fresh=self._fresh)
                self._pruner.look_around(mine.run, first_plan.bytes_on_disk())
                return asdict(mine.record)

        member: LeaseView | None = None
        seen_within = min(_SEEN_WITHIN, self._ranks.limit)

        def confirm() -> None:
            nonlocal member
            record = LeaseRecord(**records[0])
            with self._explained():
                member = mine or join(self.root, record, rank=self._ranks.rank, wait=seen_within, clock=self._clock)

        try:
            records = self._ranks.agree("own", own, limit=self._ranks.limit + wait)
            # Longer than whoever does not see it looks for it: what it has to say is what all should raise.
            self._ranks.agree("join", confirm, limit=self._ranks.limit + seen_within)
        except BaseException:
            if mine is not None:
                mine.release()
            raise
        assert member is not None
        return member

    @property
    def run_name(self) -> str:
        """The run's name."""
        return self._lease.run

    @property
    def attempt(self) -> int:
        """How often the folder was taken: the fencing number of this process."""
        return self._lease.attempt

    # Saving

    def save(
        self,
        step: int,
        *,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
        values: Mapping[str, Any] | None = None,
        extra_files: Callable[[], Sequence[FileLayout]] = tuple,
        unrequested: bool = False,
        replace: bool = False,
        background: bool = False,
        progress: Progress | None = None,
        time_limit: timedelta | None = None,
    ) -> Save:
        """Save the state as `checkpoint-<step>`. Durable on return; with `background`, once `wait()` returns.

        `extra_files`: more files of this rank. Called once, after the save before this one has ended, and on all ranks
            before any of them can have failed: it may use collectives.
        `unrequested`: the script's save strategy did not request this save (see `Retention.keep_requested`).
        `replace`: replace a checkpoint of this step even if this process has saved or restored it. The old one stays
            until the new one is durable.
        `time_limit`: the process ends this soon after the save. Retention no longer runs, and no rank is waited for
            longer than this.
        """
        step = operator.index(step)
        if step < 0:
            raise ConfigError(f"step={step}: steps count from 0")
        if self._closed:
            raise ConfigError(f"the checkpointer of {self.root} is closed: make a new one")
        target = paths.checkpoint(self.root, step)
        request = SaveRequest(step, epoch, metrics, values, extra_files, unrequested, replace)
        self._ending = time_limit is not None
        if time_limit is not None:
            self._staging.close()  # pinning memory that nobody needs any more would slow this save down
            self._ranks.limit = min(self._ranks.limit, time_limit)
        with self._explained():
            return self._save(target, request, background, progress)

    def save_if_due(self, step: int, *, epoch_ended: bool = False, **details: Any) -> Save | None:
        """A background save if the schedule says so. Takes what `save` takes."""
        if self._ranks.world_size == 1:  # several hear of it together, when they next agree on something
            self._background.raise_error()
        return (
            self.save(step, background=True, **details) if self._coordinated.at(step, epoch_ended=epoch_ended) else None
        )

    def _save(self, target: Path, request: SaveRequest, background: bool, progress: Progress | None) -> Save:
        start = self._clock.monotonic()
        job: SaveJob | None = None
        may_skip = background and self._when_busy == "skip"
        if not may_skip:
            self._let_save_end(request.step)
        files = request.extra_files()

        def describe() -> dict[str, Any]:
            nonlocal job
            self._background.raise_error()
            decision: dict[str, Any] = {"step": request.step}
            if self._ranks.rank == 0:
                decision |= self._decide(target, request, may_skip)
            if "skip" in decision:
                return decision
            job = self._new_job(request, files, progress)
            return {**decision, **job.described()}

        with self._logged_once():
            plans = self._ranks.agree("plan", describe)
        check_same_step(plans)
        if skip := plans[0].get("skip"):
            return Save(request.step, target, skipped=skip)
        self._let_save_end(request.step)
        assert job is not None
        job.begin(plans, self._make_room)
        save = Save(request.step, target, job.plan.bytes, diverged=job.diverged)
        self._bytes = job.plan.bytes
        self._throughput.begin(request.step, self._bytes, self._ranks.world_size)
        if background and self._staging.has_room(job.plan.blocks):
            job.stage()
            save._done = self._background.write(partial(self._finish, job, target))
        else:
            with self._pruner.giving_way():
                self._finish(job, target)
        save.blocked = timedelta(seconds=self._clock.monotonic() - start)
        self.schedule.saved(request.step, save.blocked)
        if self._ranks.rank == 0 and not self._ending:
            self._background.do(self._retire)
        return save

    def _let_save_end(self, step: int) -> None:
        if self._background.writing:
            log.info("the save at step %d waits for the one before it", step)
            self._background.let_save_end()

    def _decide(self, target: Path, request: SaveRequest, may_skip: bool) -> dict[str, Any]:
        """Is there something to save, and why may it replace what is there?"""
        self._lease.check()  # what is there may be a newer attempt's
        if may_skip and self._background.writing:
            log.warning("the save at step %d is left out: the one before it is still being written", request.step)
            return {"skip": "another save was still running"}
        if not target.exists():
            return {}
        if request.replace and (target in self._saved or target.name == self._parent):
            return {"superseding": True}
        reason = self._reason_to_replace(target)
        if reason is not None:
            return {"replacing": reason}
        log.info("%s is there already and valid: kept", target)
        return {"skip": "it is there already, and valid"}

    def _new_job(self, request: SaveRequest, files: Sequence[FileLayout], progress: Progress | None) -> SaveJob:
        self._saves += 1
        created = datetime.fromtimestamp(self._clock.time(), timezone.utc)
        manifest = request.manifest(created, self._lease, self._ranks, parent=self._parent, state=self._state.names)
        return SaveJob(
            self._disk,
            self._pool,
            self._ranks,
            self._lease,
            root=self.root,
            folder=paths.saving(self.root, request.step, self.attempt),
            plan=self._plan(request.values, files),
            manifest=manifest,
            number=self._saves,
            progress=self._throughput.counting(progress),
        )

    def _finish(self, job: SaveJob, target: Path) -> None:
        with self._throughput:
            job.finish()
        self._saved.add(target)
        self._pruner.saved(paths.step_of(target))

    def _reason_to_replace(self, target: Path) -> str | None:
        """Why what stands at `target` does not count as this save; None if it does."""
        if target in self._saved:
            return None
        try:
            found = verify(target, self._pool)
        except InvalidCheckpoint as error:
            return f"a newer save of the same step replaced it; it was not valid: {error.reason}"
        if found.manifest is not None and found.manifest.run != self.run_name:
            return f"run {self.run_name!r} saved the same step; this one is of run {found.manifest.run!r}"
        return None

    def _plan(self, values: Mapping[str, Any] | None = None, files: Sequence[FileLayout] = ()) -> Plan:
        the_plan = plan(
            self._state,
            values,
            more=files,
            rng=self._rng,
            shard_bytes=self._shard_bytes,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )
        check_loadable(the_plan)
        return the_plan

    def _make_room(self, needed: int) -> None:
        """Raise StorageFull unless so many bytes fit, when all has gone that may go."""
        try:
            check_room(self.root, needed)
        except StorageFull:
            if self._pruner.newest is None:
                raise
            self._background.do_now(self._retire)
            check_room(self.root, needed)
        if not self._ending:
            self._pruner.look_again(needed)

    def _retire(self) -> None:
        assert isinstance(self._lease, FolderLease)
        with self._explained():
            self._pruner.prune(self._lease)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            explain(error, self.root)

    # Waiting

    def wait(self) -> None:
        """Until everything that was asked for is done; raises what went wrong in the background."""
        self._background.wait()

    @property
    def save_in_progress(self) -> SaveInProgress | None:
        """The save that is being written."""
        return self._throughput.running

    def seconds_for_save(self) -> float | None:
        """How long the next will take, by the speed of the last; None before the first."""
        return self._throughput.seconds_for(self.checkpoint_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """Of the last save that was asked for, or of the state at the start."""
        return self._bytes

    def drain_save(self) -> BaseException | None:
        """Wait for the running save, not for retention. What went wrong in the background so far: told here, it is not
        raised by the next call."""
        return self._background.drain()

    def abort(self) -> None:
        """Give up the running background save, on every rank: each calls it. One that is all but done is finished."""
        self._throughput.abort()
        if self.drain_save() is not None:
            log.warning("a running save was given up")

    def run_after_saves(self, work: Callable[[], None]) -> None:
        """Do this on the engine's thread, when all that was asked for is done, retention included."""
        self._background.do(work)

    def pin(self, *steps: int | None) -> None:
        """The checkpoints of these steps stay, whatever retention says; those that were pinned before may go."""
        self._pruner.pinned = frozenset(steps)

    def mark_finished(self, step: int, request: Any = None) -> None:
        """Training is done with this step, which was saved: once that is durable, the folder says so. `request`: what
        there was to do (see `Restored.finished`)."""
        self.wait()

        def note() -> None:
            if isinstance(self._lease, FolderLease):
                finished_marker.write(self._disk, self.root, self._lease, step, request)

        with self._explained():
            self._ranks.agree("finish", note)

    def release(self) -> None:
        """The process is about to end: give the folder up, and wait for nothing. A removal of something old that is
        running is finished by the next start."""
        if not self._closed:
            self._closed = True
            self._lease.release()

    @contextlib.contextmanager
    def _logged_once(self) -> Iterator[None]:
        """A save that failed in the background failed on all ranks: when one of them raises that, all of them do."""
        try:
            yield
        except RankFailed:
            self._background.let_save_end()  # it may not have got to know yet
            self._background.raise_error()
            raise

    def warm_up(self, *, more: int = 0, wait: bool = False) -> None:
        """Get memory for background saves ready, in the background. Best called when the optimizer has its state.
        `more`: bytes that `files` will have, about."""
        self._staging.prepare(self._plan().blocks + math.ceil(more / BLOCK_BYTES), wait=wait)

    def close(self) -> None:
        """Finish what is running and give the folder up."""
        self._close(together=True)

    def _close(self, *, together: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._background.join()
            self._staging.close()
            self._pool.empty()  # not when the collector finds us: the next one of this process needs as much
            self._lease.release()
            self._coordinated.close()
            # Whoever hosts the store must not leave before the others have read how the last save went.
            if together and self._ranks.world_size > 1:
                with contextlib.suppress(RanksError):
                    self._ranks.agree("close", limit=min(_CLOSE_WITHIN, self._ranks.limit))
            if self._ranks_are_ours:
                self._ranks.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, error: object, *exc: object) -> None:
        self._close(together=error is None)

    # Restoring

    def restore(
        self, *, verify_all_files: bool = False, required_file: str | None = None, progress: Progress | None = None
    ) -> Restored | None:
        """Go on from the newest valid checkpoint. None if there is none and nothing that looks like one.

        `verify_all_files`: also verify the files that somebody else reads next, and keep them in the page cache.
        `required_file`: a file that a checkpoint without our manifest must have.
        """
        job = resume.ResumeJob(
            self._disk,
            self.root,
            self.run_name,
            self._state,
            self._pool,
            self._ranks,
            strict=self._strict,
            rng=self._rng,
            verify_all_files=verify_all_files,
            required_file=required_file,
            progress=progress,
            settle=self.wait,
        )
        with self._explained(), self._logged_once():
            restored = job.newest_valid()
        if restored is None:
            return None
        found, values = restored
        self._parent = found.path.name
        self._pruner.newest = found.step
        if job.from_medium and found.manifest is not None and found.manifest.world_size == self._ranks.world_size:
            self._pruner.verified = found.step  # every byte of it was read back
        self.schedule.saved(found.step)
        manifest = found.manifest
        return Restored(
            step=found.step,
            epoch=manifest.epoch if manifest else None,
            path=found.path,
            values=values,
            metrics=manifest.metrics if manifest else {},
            passed_over=job.passed_over,
            finished=job.finished,
        )

    # Looking

    def parts(self) -> dict[str, Any]:
        """The state as this process has it now, by name: references to live tensors."""
        return parts_of(self._state, self._ranks.rank, rng=self._rng)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Every checkpoint in the folder, newest first."""
        return list_checkpoints(self.root)

    def verify(self, step: int, *, progress: Progress | None = None) -> CheckpointInfo:
        """Read every byte of a checkpoint; InvalidCheckpoint says what is wrong."""
        path = paths.checkpoint(self.root, step)
        with self._explained(), reading(path):
            return verify(path, self._pool, progress=progress)
