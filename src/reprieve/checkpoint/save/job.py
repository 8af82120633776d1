"""One save, from the state to a checkpoint: the arrows of docs/architecture.md, each an agreement of all ranks.

    plan     every rank has the same files in mind; replicas are compared on a sample
    begin    there is room; ranks that share a page give its bytes to the one that writes it
    (stage   a background save copies the state; training goes on)
    make     rank 0 makes the folder and the files
    write    each rank writes its pieces
    flush    pieces that had to wait for others are written; everything is durable
    commit   rank 0 writes the manifest and makes the checkpoint visible

A rank that fails in any of them (a full disk, a kill, a stall past the limit) makes it fail on all of them, with its
reason; rank 0 then removes what was written. For one rank alone an agreement is a plain call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder import commit
from reprieve.checkpoint.folder.lease import FolderLease, LeaseView
from reprieve.checkpoint.format.manifest import FileEntry, Manifest
from reprieve.checkpoint.io.writer import Crcs, Writer
from reprieve.checkpoint.save import page_exchange
from reprieve.checkpoint.save.plan import Plan
from reprieve.checkpoint.save.replica_check import Divergence, compare, sample
from reprieve.errors import RanksError, StateError
from reprieve.ranks.group import Ranks
from reprieve.storage.disk import Disk, explain

log = logging.getLogger("reprieve")

T = TypeVar("T")


class SaveJob:
    """A save as one rank takes part in it."""

    def __init__(
        self,
        disk: Disk,
        pool: BlockPool,
        ranks: Ranks,
        owner: LeaseView,
        *,
        root: Path,
        folder: Path,
        plan: Plan,
        manifest: Manifest,
        number: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._disk = disk
        self._pool = pool
        self._ranks = ranks
        self._owner = owner
        self._root = root
        self._folder = folder
        self.plan = plan
        self._manifest = manifest
        self._number = number
        self._writer = Writer(disk, pool, folder, plan.parts, progress=progress)
        self._letters = ""
        self._folders: Set[str] = frozenset()
        self._replacing: str | None = None
        self._superseding = False
        self.diverged: list[Divergence] = []

    def described(self) -> dict[str, Any]:
        """What the other ranks need to know of this one's plan."""
        if self._ranks.world_size == 1:
            return {}
        return {
            "number": self._number,
            "files": self.plan.fingerprints(),
            "folders": sorted(self.plan.folders),
            "own": self.plan.bytes_on_disk(alone=False),
            "sample": sample(self.plan, self._manifest.step, self._ranks.rank, self._pool),
        }

    def begin(self, plans: list[dict[str, Any]], make_room: Callable[[int], None]) -> None:
        """Go on only if all ranks plan the same and there is room for it. Nothing on the disk changes yet: training
        waits for this, and beside a removal a file system takes seconds to make large files."""
        self._replacing, self._superseding = plans[0].get("replacing"), "superseding" in plans[0]
        self._folders = self.plan.folders.union(*(one["folders"] for one in plans[1:]))
        needed = self.plan.bytes_on_disk() + sum(one["own"] for one in plans[1:])
        if self._ranks.world_size > 1:
            self._compare(plans)
            # Rank 0's number: one that did not get to describe its plan, because another rank had failed, counts less.
            self._letters = f"edges-{plans[0]['number']}"
        sent: list[int] = []

        def prepare() -> None:
            if self._ranks.rank == 0:
                make_room(needed)
            # Here, so that all of them are there when the first rank asks for its own: nobody waits for a rank that
            # has failed meanwhile.
            for to, bundle in page_exchange.outgoing(self.plan.parts, self._ranks.rank, self._pool).items():
                sent.append(to)
                self._ranks.send(self._letters, to, bundle)

        with self._discarding():
            try:
                self._ranks.agree("begin", self._explained(prepare))
            except BaseException:
                with contextlib.suppress(RanksError):
                    for to in sent:
                        self._ranks.take_back(self._letters, to)
                raise

    def stage(self) -> None:
        """Copy the state: when this returns, training may change it."""
        try:
            with self._discarding():
                self._writer.stage()
        except BaseException as error:
            self._tell(error)
            raise

    def finish(self) -> None:
        """Make the files, write, flush and commit; durable on return, on every rank."""
        with self._discarding(), self._writer:
            self._ranks.agree("make", self._explained(self._make))
            written = self._ranks.agree("write", self._explained(self._write))
            durable = self._ranks.agree("flush", self._explained(lambda: self._flush(written)))
            self._ranks.agree("commit", self._explained(lambda: self._commit(durable)))

    # What each rank does

    def _compare(self, plans: list[dict[str, Any]]) -> None:
        """Every rank comes to the same conclusion, from the same descriptions."""
        for name in sorted(set().union(*(one["files"] for one in plans))):
            odd = [rank for rank, one in enumerate(plans) if one["files"].get(name) != plans[0]["files"].get(name)]
            if odd:
                raise StateError(
                    f"{name} would have another structure on rank {odd[0]} than on rank 0: keys, shapes, types and "
                    "optimizer settings must be the same on all ranks"
                )
        self.diverged = compare([one["sample"] for one in plans], self.plan)
        for one in self.diverged:
            log.error("step %d: %s. The checkpoint mixes them", self._manifest.step, one)

    def _make(self) -> None:
        if self._ranks.rank != 0:
            return
        self._owner.check()
        commit.begin(self._disk, self._folder)
        for inner in sorted(self._folders):
            self._disk.make_folder(self._folder / inner)
        self._writer.create()

    def _write(self) -> dict[str, list[Any]]:
        self._writer.create()
        rank, parts = self._ranks.rank, self.plan.parts
        received = {frm: self._ranks.receive(self._letters, frm) for frm in page_exchange.senders(parts, rank)}
        crcs = self._writer.write(page_exchange.incoming(parts, rank, received))
        return {name: list(known.items()) for name, known in crcs.items()}

    def _flush(self, written: list[dict[str, list[Any]]]) -> dict[str, Any]:
        crcs: dict[str, Crcs] = {}
        for of_rank in written:
            for name, known in of_rank.items():
                for number, stretches in known:
                    crcs.setdefault(name, {}).setdefault(number, []).extend(stretches)
        digests = self._writer.complete(crcs)
        return {
            part.layout.name: {"bytes": part.layout.size, "blocks": sorted(digests[part.layout.name].items())}
            for part in self.plan.parts
        }

    def _commit(self, durable: list[dict[str, Any]]) -> None:
        if self._ranks.rank != 0:
            return
        found: dict[str, tuple[int, dict[int, str]]] = {}
        for of_rank in durable:
            for name, entry in of_rank.items():
                found.setdefault(name, (entry["bytes"], {}))[1].update(entry["blocks"])
        files = {name: _entry(size, blocks, self._manifest.block_bytes) for name, (size, blocks) in found.items()}
        assert isinstance(self._owner, FolderLease)
        manifest = replace(self._manifest, files=files)
        commit.commit(
            self._disk,
            self._root,
            self._folder,
            manifest,
            self._owner,
            replacing=self._replacing,
            superseding=self._superseding,
        )

    # When something goes wrong

    def _tell(self, error: BaseException) -> None:
        """Let the others know why this rank will not come to `make`."""

        def fail() -> None:
            raise error

        if self._ranks.world_size > 1:
            with contextlib.suppress(BaseException):
                self._ranks.agree("make", fail)

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        """A save that fails leaves nothing behind, and says what a person can do."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._writer.close()  # an open file keeps its room when its name is gone
            with contextlib.suppress(OSError):
                self._owner.check()  # being fenced explains any odd error, and is what must be said
            if self._ranks.rank == 0:
                commit.discard(self._disk, self._folder)
            self._explain(error)
            raise

    def _explained(self, work: Callable[[], T]) -> Callable[[], T]:
        """The other ranks should read what a person can do, too."""

        def run() -> T:
            try:
                return work()
            except OSError as error:
                self._explain(error)
                raise

        return run

    def _explain(self, error: BaseException) -> None:
        if isinstance(error, OSError):
            explain(error, self._root, needed=self.plan.bytes)


def _entry(size: int, blocks: Mapping[int, str], block_bytes: int) -> FileEntry:
    starts = sorted(blocks)
    uniform = starts == list(range(0, size, block_bytes))
    return FileEntry.of(size, [blocks[start] for start in starts], None if uniform else starts)
