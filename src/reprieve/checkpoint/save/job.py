"""One save, from the live state to a checkpoint: the stages of docs/architecture.md, each an agreement of all ranks.

    plan     every rank plans the same files; replicas are compared on a sample
    begin    there is room; ranks that share a page send its bytes to the rank that writes it
    (stage   a background save copies the state; training continues)
    make     rank 0 makes the folder and the files
    write    each rank writes its ranges
    flush    ranges that had to wait for other ranks are written; everything is durable
    commit   rank 0 writes the manifest and makes the checkpoint visible

A stage that fails on one rank (a full disk, a kill, a stall past the limit) fails on all of them with that rank's
reason; rank 0 then removes what was written. In a job of one rank an agreement is a plain call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder import commit
from reprieve.checkpoint.folder.lease import FolderLease, LeaseView
from reprieve.checkpoint.folder.storage_errors import explained
from reprieve.checkpoint.format.manifest import FileEntry, Manifest
from reprieve.checkpoint.io.writer import Crcs, Writer
from reprieve.checkpoint.save import page_exchange
from reprieve.checkpoint.save.decision import SaveDecision
from reprieve.checkpoint.save.plan import Plan
from reprieve.checkpoint.save.replica_check import Divergence, compare, sample
from reprieve.errors import RanksError, StateError
from reprieve.ranks.group import Ranks
from reprieve.storage.disk import Disk, explain

log = logging.getLogger("reprieve")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """What the other ranks need to know about one rank's plan."""

    number: int
    """How many saves this rank has planned."""
    fingerprints: dict[str, str]
    """Of each file that all ranks write ranges of."""
    folders: list[str]
    own_bytes: int
    """What the files that only this rank writes take on the disk."""
    sample: dict[str, str]
    """Checksums of a few places in replicated tensors."""


class SaveJob:
    """One rank's part in one save."""

    def __init__(
        self,
        disk: Disk,
        pool: BlockPool,
        ranks: Ranks,
        lease: LeaseView,
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
        self._lease = lease
        self._root = root
        self._folder = folder
        self.plan = plan
        self._manifest = manifest
        self._number = number
        self._writer = Writer(disk, pool, folder, plan.parts, progress=progress)
        self._page_messages = ""
        """The name under which ranks exchange the bytes of shared pages."""
        self._folders: Set[str] = frozenset()
        self._decision = SaveDecision()
        self.diverged: list[Divergence] = []

    def summary(self) -> PlanSummary | None:
        """This rank's plan for the other ranks; None if there are none."""
        if self._ranks.world_size == 1:
            return None
        return PlanSummary(
            number=self._number,
            fingerprints=self.plan.fingerprints(),
            folders=sorted(self.plan.folders),
            own_bytes=self.plan.bytes_on_disk(alone=False),
            sample=sample(self.plan, self._manifest.step, self._ranks.rank, self._pool),
        )

    def begin(self, summaries: Sequence[PlanSummary], decision: SaveDecision, make_room: Callable[[int], None]) -> None:
        """Continue only if all ranks plan the same and there is room for it.

        Nothing on the disk changes yet: training waits for this, and while a removal runs a file system takes seconds
        to make large files.
        """
        self._decision = decision
        self._folders = self.plan.folders.union(*(summary.folders for summary in summaries))
        needed = self.plan.bytes_on_disk() + sum(summary.own_bytes for summary in summaries[1:])
        if self._ranks.world_size > 1:
            self._compare(summaries)
            # Rank 0's number: a rank whose plan was never described, because another rank had failed, counts less.
            self._page_messages = f"edges-{summaries[0].number}"
        sent: list[int] = []

        def prepare() -> None:
            if self._ranks.rank == 0:
                make_room(needed)
            # Sent here, so that all messages are there when the first rank receives: no rank waits for one that has
            # failed meanwhile.
            for receiver, bundle in page_exchange.outgoing(self.plan.parts, self._ranks.rank, self._pool).items():
                sent.append(receiver)
                self._ranks.send(self._page_messages, receiver, bundle)

        with self._discarding():
            try:
                self._ranks.agree("begin", self._explained(prepare))
            except BaseException:
                with contextlib.suppress(RanksError):
                    for receiver in sent:
                        self._ranks.discard_sent(self._page_messages, receiver)
                raise

    def stage(self) -> None:
        """Copy the state. When this returns, training may change it."""
        try:
            with self._discarding():
                self._writer.stage()
        except BaseException as error:
            self._report(error)
            raise

    def finish(self) -> None:
        """Make the files, write, flush and commit. Durable on return, on every rank."""
        with self._discarding(), self._writer:
            self._ranks.agree("make", self._explained(self._make))
            written = self._ranks.agree("write", self._explained(self._write))
            durable = self._ranks.agree("flush", self._explained(partial(self._flush, written)))
            self._ranks.agree("commit", self._explained(partial(self._commit, durable)))

    # What each rank does

    def _compare(self, summaries: Sequence[PlanSummary]) -> None:
        """Compare the plans. Every rank comes to the same conclusion, from the same summaries."""
        fingerprints = [summary.fingerprints for summary in summaries]
        for name in sorted(set().union(*fingerprints)):
            differing = [
                rank for rank, files in enumerate(fingerprints) if files.get(name) != fingerprints[0].get(name)
            ]
            if differing:
                raise StateError(
                    f"{name} would have another structure on rank {differing[0]} than on rank 0: keys, shapes, types "
                    "and optimizer settings must be the same on all ranks"
                )
        self.diverged = compare([summary.sample for summary in summaries], self.plan)
        for divergence in self.diverged:
            log.error(
                "step %d: %s. The checkpoint mixes them: check that every rank starts from the same weights",
                self._manifest.step,
                divergence,
            )

    def _make(self) -> None:
        if self._ranks.rank != 0:
            return
        self._lease.check()
        commit.begin(self._disk, self._folder)
        for inner in sorted(self._folders):
            self._disk.make_folder(self._folder / inner)
        self._writer.create()

    def _write(self) -> dict[str, list[Any]]:
        self._writer.create()
        rank, parts = self._ranks.rank, self.plan.parts
        received = {
            sender: self._ranks.receive(self._page_messages, sender) for sender in page_exchange.senders(parts, rank)
        }
        crcs = self._writer.write(page_exchange.incoming(parts, rank, received))
        return {name: list(by_block.items()) for name, by_block in crcs.items()}

    def _flush(self, written: list[dict[str, list[Any]]]) -> dict[str, Any]:
        crcs: dict[str, Crcs] = {}
        for rank_crcs in written:
            for name, by_block in rank_crcs.items():
                for number, ranges in by_block:
                    crcs.setdefault(name, {}).setdefault(number, []).extend(ranges)
        digests = self._writer.complete(crcs)
        return {
            part.layout.name: {"bytes": part.layout.size, "blocks": sorted(digests[part.layout.name].items())}
            for part in self.plan.parts
        }

    def _commit(self, durable: list[dict[str, Any]]) -> None:
        if self._ranks.rank != 0:
            return
        digests: dict[str, tuple[int, dict[int, str]]] = {}
        for rank_files in durable:
            for name, entry in rank_files.items():
                digests.setdefault(name, (entry["bytes"], {}))[1].update(entry["blocks"])
        files = {name: _entry(size, blocks, self._manifest.block_bytes) for name, (size, blocks) in digests.items()}
        assert isinstance(self._lease, FolderLease)
        commit.commit(
            self._disk,
            self._root,
            self._folder,
            replace(self._manifest, files=files),
            self._lease,
            replacing=self._decision.replacing,
            superseding=self._decision.superseding,
        )

    # When something goes wrong

    def _report(self, error: BaseException) -> None:
        """Report to the other ranks why this one will not come to `make`."""

        def fail() -> None:
            raise error

        if self._ranks.world_size > 1:
            with contextlib.suppress(BaseException):
                self._ranks.agree("make", fail)

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        """Remove what was written if the save fails, and raise an error that tells the user what to do."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._writer.close()  # an open file keeps its space after its name is gone
            with contextlib.suppress(OSError):
                self._lease.check()  # being fenced explains any odd error, and is the error to raise
            if self._ranks.rank == 0:
                commit.discard(self._disk, self._folder)
            if isinstance(error, OSError):
                explain(error, self._root, needed=self.plan.bytes)
            raise

    def _explained(self, work: Callable[[], T]) -> Callable[[], T]:
        """The same work, with storage errors that tell the user what to do: the other ranks report them, too."""
        return explained(self._root, needed=self.plan.bytes)(work)


def _entry(size: int, blocks: Mapping[int, str], block_bytes: int) -> FileEntry:
    starts = sorted(blocks)
    uniform = starts == list(range(0, size, block_bytes))
    return FileEntry.of(size, [blocks[start] for start in starts], None if uniform else starts)
