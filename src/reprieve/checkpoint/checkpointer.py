"""The front of the checkpoint engine: one object that saves a training state, restores it and lists its checkpoints.

`save/saver.py` runs the saves, `save/job.py` has the stages of one save, `restore/resume.py` those of a resume; each
stage is a module of this package. Saves run one at a time. In a job of several ranks every rank makes the same calls;
rank 0 holds the folder's lease and decides, all ranks confirm.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.checkpoint.coordinated_schedule import CoordinatedSchedule
from reprieve.checkpoint.folder import attempts, finished_marker, paths
from reprieve.checkpoint.folder.catalog import CheckpointInfo, list_checkpoints
from reprieve.checkpoint.folder.lease import FolderLease
from reprieve.checkpoint.folder.pruning import Pruner
from reprieve.checkpoint.folder.retention import Retention, reading
from reprieve.checkpoint.folder.startup import FolderStartup
from reprieve.checkpoint.folder.storage_errors import explained
from reprieve.checkpoint.folder.verify import verify
from reprieve.checkpoint.format.layout import FileLayout
from reprieve.checkpoint.restore.resume import ResumeJob
from reprieve.checkpoint.results import Restored, Save
from reprieve.checkpoint.save.plan import SHARD_BYTES
from reprieve.checkpoint.save.planner import Planner
from reprieve.checkpoint.save.request import SaveRequest
from reprieve.checkpoint.save.saver import Progress, Saver
from reprieve.checkpoint.save.throughput import SaveInProgress
from reprieve.checkpoint.schedule import Every, Schedule
from reprieve.checkpoint.state.fingerprint import parts_of
from reprieve.checkpoint.state.state import State
from reprieve.clock import Clock, SystemClock
from reprieve.errors import ConfigError, RanksError
from reprieve.ranks.group import LIMIT, Ranks
from reprieve.storage.disk import Disk
from reprieve.storage.uri import local_path
from reprieve.units import parse_duration, parse_size

log = logging.getLogger("reprieve")

_CLOSE_LIMIT = timedelta(seconds=30)


class Checkpointer:
    """Saves and restores the objects given by name.

        checkpointer = Checkpointer("checkpoints", model=model, optimizer=optimizer, keep=3, every="10m")
        resumed = checkpointer.restore()                  # None: no checkpoint there, a fresh start
        for step in range(resumed.step if resumed else 0, steps):
            train_one_step()
            checkpointer.save_if_due(step + 1)            # in the background
        checkpointer.save(steps)                          # durable on return
        checkpointer.close()

    `every`: when `save_if_due` saves: 500, "500 steps", "epoch", "10m", a list of them, or None for never.
    `keep`, `keep_every`, `best`, `keep_requested`: what retention keeps, see `Retention`.
    `name`: the run's name; a restart with the same name continues the run. Default: `REPRIEVE_RUN`, else the name that
        the folder has already, else a new one.
    `fresh`: start over; checkpoints that are there already are moved to a folder beside them. A text is the id of the
        request, and a request with an id is carried out once.
    `strict`: a missing or unexpected key in a checkpoint is an error.
    `rng`: save and restore the global random number generators.
    `when_busy`: a background save that comes due while another one runs waits for it ("wait") or is left out ("skip").
    `take_over_after`: how long to wait for an earlier attempt of the same run that is still alive.
    `rank_timeout`: how much later than the first another rank may reach a save or a restore before it fails.
    `ranks`: the processes of the job; detected from torchrun or torch.distributed by default.
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
        fresh: bool | str = False,
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
            raise ConfigError(f'when_busy={when_busy!r}: write "wait" or "skip"')
        self.root = local_path(uri)
        self.retention = Retention(keep=keep, keep_every=keep_every, best=best, keep_requested=keep_requested)
        self._clock = clock or SystemClock()
        self.schedule = Schedule.of(every, self._clock)
        self._state = State(state)
        self._strict = strict
        self._rng = rng
        self._disk = disk or Disk()
        shard_size = parse_size(shard_bytes)
        self._pool = BlockPool(pinned=torch.cuda.is_available())
        self._pruner = Pruner(self._disk, self.root, self.retention)
        self._closed = False
        self._closes_ranks = ranks is None
        self._ranks = ranks if ranks is not None else Ranks.detect(parse_duration(rank_timeout))
        self._planner = Planner(
            state=self._state,
            rng=rng,
            shard_bytes=shard_size,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )
        request = None if fresh is False else "" if fresh is True else fresh
        startup = FolderStartup(self._disk, self.root, self._ranks, self._pruner, self._clock, start_over=request)
        self._first_save_bytes = 0
        self._lease = startup.take_lease(
            name or os.environ.get("REPRIEVE_RUN") or None,
            wait=parse_duration(take_over_after),
            plan_first_save=self._plan_first_save,
        )
        if self.schedule.auto is not None:
            # Under the lease: an earlier attempt that still saved meanwhile would count as lost.
            self.schedule.auto.learn(attempts.read(self.root), self._clock.time())
        self._ranks = self._ranks.scoped(f"{self.run_name}/{self.attempt}")
        self._coordinated = CoordinatedSchedule(self.schedule, self._ranks)
        self._saver = Saver(
            self._disk,
            self.root,
            self._lease,
            self._ranks,
            self._clock,
            planner=self._planner,
            pool=self._pool,
            pruner=self._pruner,
            checkpoint_bytes=self._first_save_bytes,
            skip_when_busy=when_busy == "skip",
        )

    def _plan_first_save(self) -> int:
        """The bytes that it takes on the disk."""
        plan = self._planner.plan()
        self._first_save_bytes = plan.bytes
        return plan.bytes_on_disk()

    @property
    def run_name(self) -> str:
        """The run's name."""
        return self._lease.run

    @property
    def attempt(self) -> int:
        """How often the folder's lease was taken: the fencing number of this process."""
        return self._lease.attempt

    @property
    def checkpoints_created(self) -> int:
        """How many checkpoints the run has made, in all its attempts, those that were removed included. On rank 0."""
        return self._pruner.created

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

        `extra_files`: more files of this rank. Called once, after the previous save has ended, and on all ranks before
            any of them can have failed: it may use collectives.
        `unrequested`: the script's save strategy did not request this save (see `Retention.keep_requested`).
        `replace`: replace a checkpoint of this step even if this process has saved or restored it. The old one stays
            until the new one is durable.
        `time_limit`: this is the last save before the process ends. It is not followed by pruning, and from here on
            this checkpointer waits for another rank no longer than this.
        """
        step = operator.index(step)
        if step < 0:
            raise ConfigError(f"step={step}: steps count from 0")
        if self._closed:
            raise ConfigError(f"the checkpointer of {self.root} is closed: make a new one")
        if time_limit is not None:
            self._prepare_last_save(time_limit)
        request = SaveRequest(
            step, epoch, metrics, values, extra_files, unrequested, replace, is_last=time_limit is not None
        )
        with explained(self.root):
            save = self._saver.save(request, background=background, progress=progress)
        if save.skipped is None:
            self.schedule.saved(step, save.blocked)
        return save

    def save_if_due(self, step: int, *, epoch_ended: bool = False, **details: Any) -> Save | None:
        """Save in the background if the schedule says so. Takes the arguments of `save`."""
        if self._ranks.world_size == 1:  # several ranks raise it together, at their next agreement
            self._saver.background.raise_errors()
        if not self._coordinated.is_due(step, epoch_ended=epoch_ended):
            return None
        return self.save(step, background=True, **details)

    def _prepare_last_save(self, time_limit: timedelta) -> None:
        self._saver.staging.close()  # pinning memory that nothing needs any more would slow the save down
        # For good: what follows the save, `close` included, must not take longer either.
        self._ranks.limit = min(self._ranks.limit, time_limit)

    def warm_up(self, *, more: int = 0, wait: bool = False) -> None:
        """Allocate memory for background saves ahead, on a thread. Best called when the optimizer has its state.

        `more`: the bytes that `extra_files` will have, about.
        """
        self._saver.staging.prepare(self._planner.plan().blocks + math.ceil(more / BLOCK_BYTES), wait=wait)

    def pin(self, *steps: int | None) -> None:
        """Keep the checkpoints of these steps, whatever retention says. Steps that were pinned before are released."""
        self._pruner.pinned = frozenset(steps)

    def mark_finished(self, step: int, request: Any = None) -> None:
        """Record in the folder that training has finished with this step, once its save is durable.

        `request`: how much training was requested (see `Restored.finished`).
        """
        self.wait()

        def write_marker() -> None:
            if isinstance(self._lease, FolderLease):
                finished_marker.write(self._disk, self.root, self._lease, step, request)

        with explained(self.root):
            self._ranks.agree("finish", write_marker)

    # Waiting and closing

    def wait(self) -> None:
        """Wait for every save that was requested, and for pruning; raises the first error in the background."""
        self._saver.background.wait()

    @property
    def save_in_progress(self) -> SaveInProgress | None:
        """The save that is being written."""
        return self._saver.throughput.running

    def seconds_for_save(self) -> float | None:
        """How long the next save takes at the speed of the last one; None before the first."""
        return self._saver.throughput.seconds_for(self.checkpoint_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """The size of the last requested save; before the first one, of the state at the start."""
        return self._saver.checkpoint_bytes

    def drain_save(self) -> BaseException | None:
        """Wait for the running save, not for pruning. Returns the first error in the background so far, which no later
        call raises."""
        return self._saver.background.drain()

    def abort(self) -> None:
        """Abort the running background save; every rank calls it. A save that is all but done is finished."""
        self._saver.throughput.abort()
        if self.drain_save() is not None:
            log.warning("a running save was aborted")

    def run_after_saves(self, work: Callable[[], None]) -> None:
        """Run this on the saving thread, after all saves that were requested and their pruning."""
        self._saver.background.submit(work)

    def release(self) -> None:
        """Release the lease without waiting for anything: the process is about to end. The next start completes a
        removal that is running."""
        if not self._closed:
            self._closed = True
            self._lease.release()

    def close(self, *, together: bool = True) -> None:
        """Finish what is running and release the lease. Without `together`, wait for no other rank."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._saver.background.join()
            self._saver.staging.close()
            self._pool.empty()  # now, not at the next garbage collection: the next Checkpointer needs as much memory
            self._lease.release()
            self._coordinated.close()
            # The process that serves the store must not leave before the others have read how the last save ended.
            if together and self._ranks.world_size > 1:
                with contextlib.suppress(RanksError):
                    self._ranks.agree("close", limit=min(_CLOSE_LIMIT, self._ranks.limit))
            if self._closes_ranks:
                self._ranks.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, error: object, *exc: object) -> None:
        self.close(together=error is None)

    # Restoring

    def restore(
        self, *, verify_all_files: bool = False, required_file: str | None = None, progress: Progress | None = None
    ) -> Restored | None:
        """Resume from the newest valid checkpoint. None if there is no checkpoint at all, valid or not.

        `verify_all_files`: also verify the files that other code reads next, and keep them in the page cache.
        `required_file`: a file that a foreign checkpoint must have.
        """
        job = ResumeJob(
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
            finish_saves=self.wait,
        )
        with explained(self.root), self._saver.background.own_error_first():
            resumed = job.newest_valid()
        if resumed is None:
            return None
        checkpoint, values = resumed
        manifest = checkpoint.manifest
        self._saver.resumed_from = checkpoint.path.name
        self._pruner.newest = checkpoint.step
        if job.from_medium and manifest is not None and manifest.world_size == self._ranks.world_size:
            self._pruner.verified = checkpoint.step  # every byte of it was read back
        self.schedule.saved(checkpoint.step)
        return Restored(
            step=checkpoint.step,
            epoch=manifest.epoch if manifest else None,
            path=checkpoint.path,
            values=values,
            metrics=manifest.metrics if manifest else {},
            passed_over=job.passed_over,
            finished=job.finished,
        )

    # Inspecting

    def parts(self) -> dict[str, Any]:
        """The state as this process has it now, by name: references to live tensors."""
        return parts_of(self._state, self._ranks.rank, rng=self._rng)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Every checkpoint in the folder, newest first."""
        return list_checkpoints(self.root)

    def verify(self, step: int, *, progress: Progress | None = None) -> CheckpointInfo:
        """Read every byte of a checkpoint; InvalidCheckpoint names the first problem."""
        path = paths.checkpoint(self.root, step)
        with explained(self.root), reading(path):
            return verify(path, self._pool, progress=progress)
