"""Resumes a run: finds the newest valid checkpoint, together with the other ranks, and restores it.

A run never starts from scratch silently: no checkpoint at all is a fresh start, but checkpoints of which none is valid
are an error.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
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
from reprieve.checkpoint.format.manifest import Manifest
from reprieve.checkpoint.io.reader import CooperativeRead
from reprieve.checkpoint.restore.load import StateLoader
from reprieve.checkpoint.state.state import State
from reprieve.errors import InvalidCheckpoint, NoValidCheckpoint, RankFailed
from reprieve.ranks.group import Ranks
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that was not used for a resume."""

    name: str
    reason: str


class ResumeJob:
    """One resume, in stages that are each an agreement of all ranks:

        choose    rank 0 chooses the newest checkpoint that looks valid
        prepare   every rank compares it with its state and finds out what it needs to read
        read      verified bytes into memory: after one bad block on one rank, all fall back to an older checkpoint
        apply     only now the state is handed to the live objects

    In a job of one rank each of them is a plain call.
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
        finish_saves: Callable[[], None] = lambda: None,
    ) -> None:
        """`finish_saves`: called first on every rank; if it fails on one rank, the resume fails on all."""
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
        self._finish_saves = finish_saves
        self._bad: tuple[Path, str] | None = None
        """The checkpoint that was tried last, and why it failed: rank 0 quarantines it."""
        self._candidates: list[CheckpointInfo] | None = None
        self.passed_over: list[PassedOver] = []
        """Newer checkpoints that could not be used, and why."""
        self.from_medium = False
        """Whether all ranks read every byte from the storage medium, and none from the page cache."""
        self.finished: Any = None
        """The content of the finished marker, if the run was finished with the restored checkpoint."""

    def newest_valid(self) -> tuple[CheckpointInfo, dict[str, Any]] | None:
        """Restore the newest valid checkpoint. Returns it and the plain values saved with it; None if there is none."""
        while True:
            choice = self._ranks.agree("choose", self._choose)[0]
            self.passed_over = [PassedOver(*entry) for entry in choice["passed_over"]]
            if choice["name"] is None:
                if self.passed_over:
                    raise NoValidCheckpoint(self._none_valid())
                return None
            path = self._root / choice["name"]
            self.finished = choice["finished"]
            checkpoint, values, reasons = self._restore(path, choice["manifest"])
            if checkpoint is not None and not reasons:
                log.info("resumed from %s", path)
                return checkpoint, values
            self._bad = path, "; ".join(dict.fromkeys(reasons))

    # Choosing

    def _choose(self) -> dict[str, Any]:
        """On rank 0: the newest remaining candidate, and those that were passed over before it."""
        if self._bad is None:
            self._finish_saves()
        if self._ranks.rank != 0:
            if self._bad is not None:
                log.warning("passed over %s: %s", *self._bad)
            return {}
        if self._bad is not None:
            self._pass_over(*self._bad)
        if self._candidates is None:
            self._candidates = list_checkpoints(self._root)
        while self._candidates:
            checkpoint = self._candidates.pop(0)
            try:
                return self._check(checkpoint)
            except InvalidCheckpoint as error:
                quarantine = not checkpoint.is_quarantined and not isinstance(error, OtherRun)
                self._pass_over(checkpoint.path, error.reason, quarantine=quarantine)
        return {"name": None, "passed_over": self._passed_over_entries()}

    def _check(self, checkpoint: CheckpointInfo) -> dict[str, Any]:
        """The choice of this checkpoint; InvalidCheckpoint if it cannot be used."""
        path, manifest = checkpoint.path, checkpoint.manifest
        checkpoint.check()
        if manifest is not None and manifest.run != self._run:
            raise OtherRun(f"written by run {manifest.run!r}, this is run {self._run!r}", path=path)
        if manifest is None:
            if self._required_file is not None and not (path / self._required_file).is_file():
                raise InvalidCheckpoint(f"{self._required_file} is missing", path=path)
            check_foreign(path)
        return {
            "name": path.name,
            "manifest": None if manifest is None else digest_of(manifest.encode()),
            "passed_over": self._passed_over_entries(),
            "finished": finished_marker.read(self._root, manifest),
        }

    def _passed_over_entries(self) -> list[list[str]]:
        return [[checkpoint.name, checkpoint.reason] for checkpoint in self.passed_over]

    def _pass_over(self, path: Path, reason: str, *, quarantine: bool = True) -> None:
        """Note a checkpoint that cannot be used, and quarantine it. On rank 0, as a part of `choose`: if it cannot be
        moved, all ranks fail at once."""
        self.passed_over.append(PassedOver(path.name, reason))
        log.warning("passed over %s: %s", path, reason)
        if quarantine:
            log.warning("quarantined as %s", commit.quarantine(self._disk, path, reason).name)
            self._disk.flush_folder(self._root)

    def _none_valid(self) -> str:
        reasons = "\n".join(f"  {checkpoint.name}: {checkpoint.reason}" for checkpoint in self.passed_over)
        return (
            f"there are checkpoints in {self._root}, and none of them can be used:\n{reasons}\n"
            "Nothing was deleted. To start over anyway, choose fresh=True"
        )

    # Restoring

    def _restore(self, path: Path, digest: str | None) -> tuple[CheckpointInfo | None, dict[str, Any], list[str]]:
        """Restore on every rank, or on none: then, the reasons of the ranks that could not."""
        with reading(path), contextlib.ExitStack() as stack:
            part = _RankRestore(path, digest, self._make_loader, stack)
            files, reasons = self._try("prepare", part.prepare)
            if not reasons:
                shared = sorted(set(files[0]).intersection(*files[1:]))
                together, error = self._join_readers(stack) if shared else (None, None)
                read = partial(part.read, shared, together=together, error=error, progress=self._progress)
                _, reasons = self._try("read", read)
            if reasons:
                return part.checkpoint, {}, reasons
            self.from_medium = all(self._ranks.agree("apply", part.apply))
            return part.checkpoint, part.values, []

    def _make_loader(self, path: Path, manifest: Manifest | None) -> StateLoader:
        return StateLoader(
            path,
            manifest,
            self._state,
            self._pool,
            strict=self._strict,
            rng=self._rng,
            verify_all_files=self._verify_all_files,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )

    def _try(self, name: str, work: Callable[[], Any]) -> tuple[list[Any], list[str]]:
        """Run a stage. Returns the result of each rank, and the reasons of those that found the checkpoint invalid."""

        def attempt() -> dict[str, Any]:
            try:
                return {"value": work()}
            except InvalidCheckpoint as error:
                return {"bad": error.reason}

        outcomes = self._ranks.agree(name, attempt)
        reasons = [outcome["bad"] for outcome in outcomes if "bad" in outcome]
        return [outcome.get("value") for outcome in outcomes], reasons

    def _join_readers(self, stack: contextlib.ExitStack) -> tuple[CooperativeRead | None, RankFailed | None]:
        """Make the process group for reading together, or return the error for the next agreement.

        This is not a part of an agreement, which some ranks might not begin: torch counts the groups that each makes.
        """
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


class _RankRestore:
    """One rank's part in the restore of one checkpoint: the work of the stages after `choose`."""

    def __init__(
        self,
        path: Path,
        digest: str | None,
        make_loader: Callable[[Path, Manifest | None], StateLoader],
        stack: contextlib.ExitStack,
    ) -> None:
        """`digest`: of the manifest that rank 0 has read."""
        self._path = path
        self._digest = digest
        self._make_loader = make_loader
        self._stack = stack
        self._loader: StateLoader | None = None
        self.checkpoint: CheckpointInfo | None = None
        self.values: dict[str, Any] = {}

    def prepare(self) -> list[str]:
        self.checkpoint = inspect_checkpoint(self._path)
        self.checkpoint.check()
        manifest = self.checkpoint.manifest
        if self._digest is not None and (manifest is None or digest_of(manifest.encode()) != self._digest):
            raise InvalidCheckpoint("this rank sees another manifest than rank 0", path=self._path)
        self._loader = self._stack.enter_context(self._make_loader(self._path, manifest))
        return self._loader.prepare()

    def read(
        self,
        shared: Collection[str],
        *,
        together: CooperativeRead | None,
        error: RankFailed | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        """`error`: why this rank could not join the others for reading together."""
        if error is not None:
            raise error
        assert self._loader is not None
        self._loader.read(shared if together else (), together=together, progress=progress)

    def apply(self) -> bool:
        assert self._loader is not None
        self.values = self._loader.apply()
        return self._loader.from_medium


class OtherRun(InvalidCheckpoint):
    """A valid checkpoint of another run: it must not be used or moved."""
