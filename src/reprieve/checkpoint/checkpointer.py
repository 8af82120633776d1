"""The engine's front: one object that saves a training state, restores it, and looks after what is on storage.

The flow of a save is in `_save`, the flow of a resume in `restore`; every arrow of them is a module of this folder.
Saves run one at a time. The training thread is blocked while the state is copied (a background save) or until it is
durable (any other); commit and retention of a background save happen on a thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from reprieve._version import __version__
from reprieve.checkpoint import commit, names, resume
from reprieve.checkpoint.blocks import BlockPool
from reprieve.checkpoint.loadable import check_loadable
from reprieve.checkpoint.manifest import FileEntry, Manifest
from reprieve.checkpoint.owner import acquire
from reprieve.checkpoint.plan import SHARD_BYTES, Plan, plan
from reprieve.checkpoint.resume import PassedOver
from reprieve.checkpoint.retention import Retention, reading, remove_doomed
from reprieve.checkpoint.room import StagingRoom, check_room, warn_if_tight
from reprieve.checkpoint.schedule import Every, Schedule
from reprieve.checkpoint.state import State
from reprieve.checkpoint.survey import Found, survey
from reprieve.checkpoint.verify import verify
from reprieve.checkpoint.workers import Workers
from reprieve.checkpoint.writer import Writer
from reprieve.clock import Clock, SystemClock
from reprieve.config import parse_duration, parse_size
from reprieve.errors import ConfigError, InvalidCheckpoint, StorageFull
from reprieve.storage.disk import Disk, explain
from reprieve.storage.uri import local_path

log = logging.getLogger("reprieve")

Progress = Callable[[int], None]
"""Called with each number of bytes that was moved, from any thread."""


@dataclass(slots=True)
class Save:
    """A save that was asked for."""

    step: int
    path: Path
    bytes: int = 0
    blocked: timedelta = timedelta(0)
    """How long training stood still."""
    skipped: str | None = None
    """Why nothing was written, if nothing was."""
    _done: Future[None] | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        return self._done is None or self._done.done()

    def wait(self) -> Path:
        """The checkpoint, once it is durable; raises what went wrong."""
        if self._done is not None:
            self._done.result()
        return self.path


@dataclass(frozen=True, slots=True)
class Restored:
    """Where the run goes on."""

    step: int
    epoch: float | None
    path: Path
    values: Mapping[str, Any]
    metrics: Mapping[str, float]
    passed_over: list[PassedOver]
    """Newer checkpoints that could not be used, and why."""


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
    `keep`, `keep_every`, `best`: what retention keeps, see `Retention`.
    `run`: the run's name; the same name after a restart goes on with the run. Default: `REPRIEVE_RUN`, else the name
        that the folder has already, else a new one.
    `fresh`: start over; checkpoints that are there already are moved to a folder beside them.
    `strict`: a missing or unexpected key on the way back is an error.
    `rng`: save and restore the global random number generators.
    `when_busy`: a background save that comes due while another one runs waits for it ("wait") or is left out ("skip").
    `take_over_after`: how long to wait for an earlier attempt of the same run that is still alive.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        every: Every = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: tuple[str, str] | None = None,
        run: str | None = None,
        fresh: bool = False,
        strict: bool = True,
        rng: bool = True,
        when_busy: str = "wait",
        take_over_after: str | float | timedelta = "60s",
        shard_bytes: str | int = SHARD_BYTES,
        disk: Disk | None = None,
        clock: Clock | None = None,
        **state: object,
    ) -> None:
        if when_busy not in ("wait", "skip"):
            raise ConfigError(f'when_busy={when_busy!r}: it is "wait" or "skip"')
        self.root = local_path(uri)
        self.retention = Retention(keep=keep, keep_every=keep_every, best=best)
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
        self._staging = StagingRoom(self._pool)
        self._thread = Workers(1, "reprieve-save")
        self._background: list[Future[None]] = []
        self._writing: Future[None] | None = None
        self._hurry = threading.Event()
        self._gave_way = False
        self._saved: set[Path] = set()
        self._last_saved: int | None = None
        self._verified: Path | None = None
        self._closed = False

        first_plan = self._plan()
        with self._explained():
            resume.make_root(self._disk, self.root)
            self._owner = acquire(
                self._disk,
                self.root,
                run or os.environ.get("REPRIEVE_RUN") or None,
                wait=parse_duration(take_over_after),
                clock=self._clock,
            )
            try:
                resume.clean_up(self._disk, self.root, fresh=fresh)
                self._check_room_at_start(first_plan)
            except BaseException:
                self._owner.release()
                raise

    @property
    def run(self) -> str:
        """The run's name."""
        return self._owner.run

    @property
    def attempt(self) -> int:
        """How often the folder was taken: the fencing number of this process."""
        return self._owner.attempt

    # Saving

    def save(
        self,
        step: int,
        *,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
        values: Mapping[str, Any] | None = None,
        background: bool = False,
        progress: Progress | None = None,
    ) -> Save:
        """Save the state as `checkpoint-<step>`. Durable on return; with `background`, once `wait()` returns."""
        step = operator.index(step)
        if step < 0:
            raise ConfigError(f"step={step}: steps count from 0")
        if self._closed:
            raise ConfigError(f"the checkpointer of {self.root} is closed: make a new one")
        self._raise_background_error()
        target = names.checkpoint(self.root, step)
        if self._writing is not None and not self._writing.done():
            if background and self._when_busy == "skip":
                log.warning("the save at step %d is left out: the one before it is still being written", step)
                return Save(step, target, skipped="another save was still running")
            log.info("the save at step %d waits for the one before it", step)
            self._writing.exception()
            self._raise_background_error()
        with self._explained():
            replacing = self._reason_to_replace(target) if target.exists() else None
            if target.exists() and replacing is None:
                log.info("%s is there already and valid: kept", target)
                return Save(step, target, skipped="it is there already, and valid")
            details = _Details(step, None if epoch is None else float(epoch), _finite(metrics), values, replacing)
            return self._save(target, details, background, progress)

    def save_if_due(self, step: int, *, epoch_ended: bool = False, **details: Any) -> Save | None:
        """A background save if the schedule says so. Takes what `save` takes."""
        if not self.schedule.due(step, epoch_ended=epoch_ended):
            return None
        return self.save(step, background=True, **details)

    def _save(self, target: Path, details: _Details, background: bool, progress: Progress | None) -> Save:
        start = self._clock.monotonic()
        the_plan = self._plan(details.values)
        self._make_room(the_plan)
        self._owner.check()

        def manifest(files: Mapping[str, FileEntry]) -> Manifest:
            return Manifest(
                step=details.step,
                epoch=details.epoch,
                created=datetime.fromtimestamp(self._clock.time(), timezone.utc).isoformat(timespec="seconds"),
                run=self.run,
                attempt=self.attempt,
                parent=self._parent,
                versions=_versions(),
                metrics=details.metrics,
                state=self._state.names,
                files=files,
            )

        folder = commit.begin(self._disk, self.root, details.step)
        writer = Writer(self._disk, self._pool, folder, the_plan.files, progress=progress)

        def make_durable(write: Callable[[], dict[str, FileEntry]]) -> None:
            with self._discarding(folder, the_plan):
                made = manifest(write())
                commit.commit(self._disk, self.root, folder, made, self._owner, replacing=details.replacing)
            self._saved.add(target)
            self._last_saved = details.step

        save = Save(details.step, target, the_plan.bytes)
        if background and self._staging.has_room(the_plan):
            with self._discarding(folder, the_plan):
                writer.stage()
            save._done = self._writing = self._thread.submit(partial(make_durable, writer.finish))
            self._background.append(self._writing)
        else:
            self._hurry.set()  # the disk is ours alone now
            try:
                make_durable(writer.write_through)
            finally:
                self._hurry.clear()
        save.blocked = timedelta(seconds=self._clock.monotonic() - start)
        self.schedule.saved(details.step)
        self._background.append(self._thread.submit(self._retire))
        return save

    def _reason_to_replace(self, target: Path) -> str | None:
        """Why what stands at `target` does not count as this save; None if it does."""
        if target in self._saved:
            return None
        try:
            found = verify(target, self._pool)
        except InvalidCheckpoint as error:
            return f"a newer save of the same step replaced it; it was not valid: {error.reason}"
        if found.manifest is not None and found.manifest.run != self.run:
            return f"run {self.run!r} saved the same step; this one is of run {found.manifest.run!r}"
        return None

    def _plan(self, values: Mapping[str, Any] | None = None) -> Plan:
        the_plan = plan(self._state.captured(values, rng=self._rng), shard_bytes=self._shard_bytes)
        check_loadable(the_plan)
        return the_plan

    def _check_room_at_start(self, the_plan: Plan) -> None:
        found = survey(self.root)
        ours = [one for one in found if one.problem is None and one.manifest and one.manifest.run == self.run]
        self._last_saved = ours[0].step if ours else None
        doomed = self.retention.doomed(found, self.run, ours[0].step) if ours else []
        check_room(self.root, the_plan, going=sum(one.bytes for one in doomed))
        warn_if_tight(self.root, the_plan, self.retention, found)

    def _make_room(self, the_plan: Plan) -> None:
        """Raise StorageFull unless the plan fits, when all has gone that may go."""
        try:
            check_room(self.root, the_plan)
        except StorageFull:
            if self._last_saved is None:
                raise
            self._thread.submit(self._retire).result()
            check_room(self.root, the_plan)

    def _retire(self) -> None:
        """Remove what retention no longer wants, once the newest has been read back and verified."""
        if (saved := self._last_saved) is None:
            return
        doomed = self.retention.doomed(survey(self.root), self.run, saved)
        if not doomed:
            return
        newest = names.checkpoint(self.root, saved)
        if newest != self._verified:
            try:
                verify(newest, BlockPool(limit=2), progress=self._give_way)
            except _Hurry:
                return  # the save that interrupted us is followed by another pass
            except InvalidCheckpoint as error:
                log.error("nothing is removed: the newest checkpoint did not pass when read back: %s", error)
                return
            self._verified = newest
            self._gave_way = False
        with self._explained(), self._owner.committing():
            remove_doomed(self._disk, doomed)

    def _give_way(self, _count: int) -> None:
        """A save that somebody waits for has the disk to itself, but not twice in a row: what is due to go must go."""
        if self._hurry.is_set() and not self._gave_way:
            self._gave_way = True
            raise _Hurry

    @contextlib.contextmanager
    def _discarding(self, folder: Path, the_plan: Plan) -> Iterator[None]:
        """A save that fails leaves nothing behind, and says what a person can do."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._owner.check()  # being fenced explains any odd error, and is what must be said
            commit.discard(self._disk, folder)
            if isinstance(error, OSError):
                explain(error, self.root, needed=the_plan.bytes)
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            explain(error, self.root)

    # Waiting

    def wait(self) -> None:
        """Until everything that was asked for is done; raises what went wrong in the background."""
        pending, self._background = self._background, []
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def _raise_background_error(self) -> None:
        if any(future.done() and future.exception() is not None for future in self._background):
            self.wait()
        self._background = [future for future in self._background if not future.done()]

    def warm_up(self, *, wait: bool = False) -> None:
        """Get memory for background saves ready, in the background. Best called when the optimizer has its state."""
        self._staging.prepare(self._plan(), wait=wait)

    def close(self) -> None:
        """Finish what is running and give the folder up."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._thread.join()
            self._staging.close()
            self._owner.release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Restoring

    def restore(self, *, progress: Progress | None = None) -> Restored | None:
        """Go on from the newest valid checkpoint. None if there is none and nothing that looks like one."""
        self.wait()
        with self._explained():
            found, values, passed_over = resume.newest_valid(
                self._disk, self.root, self.run, self._state, self._pool,
                strict=self._strict, rng=self._rng, progress=progress,
            )  # fmt: skip
        if found is None:
            return None
        self._parent = found.path.name
        self._last_saved = found.step
        self.schedule.saved(found.step)
        manifest = found.manifest
        return Restored(
            step=found.step,
            epoch=manifest.epoch if manifest else None,
            path=found.path,
            values=values,
            metrics=manifest.metrics if manifest else {},
            passed_over=passed_over,
        )

    # Looking

    def list(self) -> list[Found]:
        """Every checkpoint in the folder, newest first."""
        return survey(self.root)

    def verify(self, step: int, *, progress: Progress | None = None) -> Found:
        """Read every byte of a checkpoint; InvalidCheckpoint says what is wrong."""
        path = names.checkpoint(self.root, step)
        with reading(path):
            return verify(path, self._pool, progress=progress)


@dataclass(frozen=True, slots=True)
class _Details:
    """What a save was asked for with."""

    step: int
    epoch: float | None
    metrics: Mapping[str, float]
    values: Mapping[str, Any] | None
    replacing: str | None


class _Hurry(Exception):
    """Somebody waits for a save: reading back can wait."""


def _finite(metrics: Mapping[str, float] | None) -> dict[str, float]:
    numbers = {name: float(value) for name, value in (metrics or {}).items()}
    odd = sorted(name for name, value in numbers.items() if not math.isfinite(value))
    if odd:
        log.warning("metrics that are not finite are not recorded with the checkpoint: %s", ", ".join(odd))
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _versions() -> dict[str, str]:
    found = {"reprieve": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("safetensors", "numpy", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
