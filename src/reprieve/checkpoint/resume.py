"""A run starts: the folder is made its own, leftovers go, and the newest valid checkpoint is found.

Never a silent start from scratch: no checkpoint at all is a fresh start; checkpoints of which none is valid
are an error.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprieve.checkpoint import commit
from reprieve.checkpoint.blocks import BlockPool
from reprieve.checkpoint.foreign import check_foreign
from reprieve.checkpoint.restore import restore
from reprieve.checkpoint.retention import reading
from reprieve.checkpoint.state import State
from reprieve.checkpoint.survey import Found, survey
from reprieve.errors import InvalidCheckpoint, NothingToResume
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
    if fresh and (old := [one.path for one in survey(root)]):
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


def newest_valid(
    disk: Disk,
    root: Path,
    run: str,
    state: State,
    pool: BlockPool,
    *,
    strict: bool,
    rng: bool,
    progress: Callable[[int], None] | None,
) -> tuple[Found | None, dict[str, Any], list[PassedOver]]:
    """Restore from the newest checkpoint that can be; those newer ones that could not, with the reasons."""
    passed_over: list[PassedOver] = []
    for found in survey(root):
        try:
            if found.set_aside:
                raise InvalidCheckpoint(found.problem or "set aside")
            values = _restore_one(found, run, state, pool, strict, rng, progress)
        except InvalidCheckpoint as error:
            passed_over.append(PassedOver(found.path.name, error.reason))
            log.warning("passed over %s: %s", found.path, error.reason)
            if not found.set_aside and not isinstance(error, OtherRun):
                log.warning("set aside as %s", commit.set_aside(disk, found.path, error.reason).name)
                disk.flush_folder(root)
            continue
        log.info("resumed from %s", found.path)
        return found, values, passed_over
    if passed_over:
        reasons = "\n".join(f"  {one.name}: {one.reason}" for one in passed_over)
        raise NothingToResume(
            f"there are checkpoints in {root}, and none of them can be used:\n{reasons}\n"
            "Nothing was deleted. To start over anyway, choose fresh=True"
        )
    return None, {}, passed_over


class OtherRun(InvalidCheckpoint):
    """Valid, but of another run: not ours to use or to move."""


def _restore_one(
    found: Found,
    run: str,
    state: State,
    pool: BlockPool,
    strict: bool,
    rng: bool,
    progress: Callable[[int], None] | None,
) -> dict[str, Any]:
    if found.problem is not None:
        raise InvalidCheckpoint(found.problem, path=found.path)
    if found.manifest is not None and found.manifest.run != run:
        raise OtherRun(f"written by run {found.manifest.run!r}, this is run {run!r}", path=found.path)
    with reading(found.path):
        if found.manifest is None:
            check_foreign(found.path)
        return restore(found.path, found.manifest, state, pool, strict=strict, rng=rng, progress=progress)
