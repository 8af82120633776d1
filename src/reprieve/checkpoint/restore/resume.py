"""A run starts: the folder is made its own, leftovers go, and the newest valid checkpoint is found.

Never a silent start from scratch: no checkpoint at all is a fresh start; checkpoints of which none is valid
are an error.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder import commit, finished_marker
from reprieve.checkpoint.folder.catalog import CheckpointInfo, inspect_checkpoint, list_checkpoints
from reprieve.checkpoint.folder.foreign import check_foreign
from reprieve.checkpoint.folder.retention import reading
from reprieve.checkpoint.format.checksum import digest_of
from reprieve.checkpoint.io.reader import CooperativeRead
from reprieve.checkpoint.restore.load import StateLoader
from reprieve.checkpoint.state.state import State
from reprieve.errors import InvalidCheckpoint, NoValidCheckpoint, RankFailed
from reprieve.ranks.group import Ranks
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that was not used."""

    name: str
    reason: str


def make_root(disk: Disk, root: Path) -> None:
    """The folder and its parents, durable: a checkpoint in a folder whose name is lost is lost."""
    if root.is_dir():
        return
    if not root.parent.is_dir():
        make_root(disk, root.parent)
    with contextlib.suppress(FileExistsError):
        disk.make_folder(root)
    disk.flush_folder(root.parent)


def clean_up(disk: Disk, root: Path, *, fresh: bool) -> None:
    for name in commit.clean_up(disk, root):
        log.warning("removed %s: a save or a removal that never finished", root / name)
    if fresh and (old := [one.path for one in list_checkpoints(root)]):
        number = 1
        while (previous := root / f"previous-{number}").exists():
            number += 1
        disk.make_folder(previous)
        disk.flush_folder(root)  # before anything moves into it
        for path in old:
            disk.rename(path, previous / path.name)
        disk.flush_folder(previous)
        disk.flush_folder(root)
        log.warning("starting over: %d checkpoints moved to %s", len(old), previous)


class ResumeJob:
    """Finds the newest checkpoint that can be used, together with the other ranks, and restores it.

        choose    rank 0 takes the newest that looks right
        prepare   every rank finds out what it needs of it
        read      verified bytes into memory: one bad block on one rank, and all fall back together
        apply     only now is anything handed to the objects

    For one rank alone each of them is a plain call.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        run: str,
        state: State,
        pool: BlockPool,
        ranks: Ranks,
        *,
        strict: bool,
        rng: bool,
        verify_all_files: bool = False,
        required_file: str | None = None,
        progress: Callable[[int], None] | None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`settle`: what every rank does first; if it fails on one, it fails on all."""
        self._disk = disk
        self._root = root
        self._run = run
        self._state = state
        self._pool = pool
        self._ranks = ranks
        self._strict = strict
        self._rng = rng
        self._verify_all_files = verify_all_files
        self._required_file = required_file
        self._progress = progress
        self._settle = settle
        self._bad: tuple[Path, str] | None = None
        """What was tried last, and why it was no good: rank 0's to set aside."""
        self._candidates: list[CheckpointInfo] | None = None
        self.passed_over: list[PassedOver] = []
        """Newer checkpoints that could not be used, and why."""
        self.from_medium = False
        """Did all ranks read the checkpoint from there, and none of it from memory?"""
        self.finished: Any = None
        """What the folder says of the run, if it was finished with the checkpoint that was restored."""

    def newest_valid(self) -> tuple[CheckpointInfo, dict[str, Any]] | None:
        """The checkpoint that was restored, and the plain values that were saved with it; None where there is none."""
        while True:
            chosen = self._ranks.agree("choose", self._choose)[0]
            self.passed_over = [PassedOver(*one) for one in chosen["passed_over"]]
            if chosen["name"] is None:
                if self.passed_over:
                    raise NoValidCheckpoint(self._nothing())
                return None
            path = self._root / chosen["name"]
            self.finished = chosen["finished"]
            found, values, reasons = self._restore(path, chosen["manifest"])
            if found is not None and not reasons:
                log.info("resumed from %s", path)
                return found, values
            self._bad = path, "; ".join(dict.fromkeys(reasons))

    def _choose(self) -> dict[str, Any]:
        """Rank 0: the newest candidate that is left, and which ones it passed over on the way."""
        if self._bad is None:
            self._settle()
        if self._ranks.rank != 0:
            if self._bad is not None:
                log.warning("passed over %s: %s", *self._bad)
            return {}
        if self._bad is not None:
            self._pass_over(*self._bad)
        if self._candidates is None:
            self._candidates = list_checkpoints(self._root)
        while self._candidates:
            found = self._candidates.pop(0)
            try:
                return self._chosen(found)
            except InvalidCheckpoint as error:
                aside = not found.set_aside and not isinstance(error, OtherRun)
                self._pass_over(found.path, error.reason, aside=aside)
        return {"name": None, "passed_over": self._told()}

    def _chosen(self, found: CheckpointInfo) -> dict[str, Any]:
        found.check()
        if found.manifest is not None and found.manifest.run != self._run:
            raise OtherRun(f"written by run {found.manifest.run!r}, this is run {self._run!r}", path=found.path)
        if found.manifest is None:
            if self._required_file is not None and not (found.path / self._required_file).is_file():
                raise InvalidCheckpoint(f"{self._required_file} is missing", path=found.path)
            check_foreign(found.path)
        digest = None if found.manifest is None else digest_of(found.manifest.encode())
        done = finished_marker.read(self._root, found.manifest)
        return {"name": found.path.name, "manifest": digest, "passed_over": self._told(), "finished": done}

    def _told(self) -> list[list[str]]:
        return [[one.name, one.reason] for one in self.passed_over]

    def _restore(self, path: Path, digest: str | None) -> tuple[CheckpointInfo | None, dict[str, Any], list[str]]:
        """Every rank restores, or none: the reasons of those that could not."""
        with reading(path), contextlib.ExitStack() as stack:
            job: StateLoader | None = None
            found: CheckpointInfo | None = None

            def prepare() -> list[str]:
                nonlocal job, found
                found = inspect_checkpoint(path)
                found.check()
                if digest is not None and (found.manifest is None or digest_of(found.manifest.encode()) != digest):
                    raise InvalidCheckpoint("this rank sees another manifest than rank 0", path=path)
                job = StateLoader(
                    path,
                    found.manifest,
                    self._state,
                    self._pool,
                    strict=self._strict,
                    rng=self._rng,
                    verify_all_files=self._verify_all_files,
                    rank=self._ranks.rank,
                    world_size=self._ranks.world_size,
                )
                stack.enter_context(job)
                return job.prepare()

            offers, reasons = self._try("prepare", prepare)
            if not reasons:
                assert job is not None
                shared = sorted(set(offers[0]).intersection(*offers[1:]))
                together, lost = self._read_together(stack) if shared else (None, None)
                read = partial(job.read, shared if together else (), together=together, progress=self._progress)
                _, reasons = self._try("read", _raise_if(lost, read))
            if reasons:
                return found, {}, reasons
            assert job is not None
            values: dict[str, Any] = {}
            restoring = job

            def apply() -> bool:
                values.update(restoring.apply())
                return restoring.from_medium

            self.from_medium = all(self._ranks.agree("apply", apply))
            return found, values, []

    def _try(self, name: str, work: Callable[[], Any]) -> tuple[list[Any], list[str]]:
        """What each rank came to, and why the checkpoint is not valid for those who found that."""

        def attempt() -> dict[str, Any]:
            try:
                return {"value": work()}
            except InvalidCheckpoint as error:
                return {"bad": error.reason}

        outcomes = self._ranks.agree(name, attempt)
        reasons = [one["bad"] for one in outcomes if "bad" in one]
        return [one.get("value") for one in outcomes], reasons

    def _read_together(self, stack: contextlib.ExitStack) -> tuple[CooperativeRead | None, RankFailed | None]:
        """Not part of an agreement, where some would not begin it: torch counts the groups that each rank makes. So
        whoever could not make it comes to the next agreement with the error."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return None, None  # every rank reads all that it needs
        from reprieve.checkpoint.io.cooperative_read import CooperativeReader

        try:
            together = CooperativeReader(self._ranks, self._ranks.limit)
        except RankFailed as error:
            return None, error
        stack.callback(together.close)
        return together, None

    def _pass_over(self, path: Path, reason: str, *, aside: bool = True) -> None:
        """Rank 0, as a part of `choose`: where it cannot move the checkpoint, all know at once."""
        self.passed_over.append(PassedOver(path.name, reason))
        log.warning("passed over %s: %s", path, reason)
        if aside:
            log.warning("set aside as %s", commit.quarantine(self._disk, path, reason).name)
            self._disk.flush_folder(self._root)

    def _nothing(self) -> str:
        reasons = "\n".join(f"  {one.name}: {one.reason}" for one in self.passed_over)
        return (
            f"there are checkpoints in {self._root}, and none of them can be used:\n{reasons}\n"
            "Nothing was deleted. To start over anyway, choose fresh=True"
        )


def _raise_if(error: RankFailed | None, work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        if error is not None:
            raise error
        work()

    return run


class OtherRun(InvalidCheckpoint):
    """Valid, but of another run: not ours to use or to move."""
