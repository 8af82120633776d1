"""Rank 0's decision about a save whose step may have a checkpoint already: keep that one, replace it, or save."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.verify import verify
from reprieve.errors import InvalidCheckpoint

log = logging.getLogger("reprieve")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """Whether to save, and what may happen to a checkpoint of the same step. It travels from rank 0 to the others."""

    skip: str | None = None
    """Why there is nothing to save; None: save."""
    replacing: str | None = None
    """Why the checkpoint that is there is quarantined."""
    superseding: bool = False
    """The checkpoint that is there is valid: it stays until the new one is durable."""


def decide_on_existing(
    target: Path, run: str, pool: BlockPool, *, replace: bool, was_saved: bool, was_restored: bool
) -> SaveDecision:
    """Decide what to do about a checkpoint at `target`.

    `replace`: the caller wants a checkpoint replaced that this process has saved or restored.
    """
    if not target.exists():
        return SaveDecision()
    if replace and (was_saved or was_restored):
        return SaveDecision(superseding=True)
    if not was_saved and (reason := _reason_to_replace(target, run, pool)) is not None:
        return SaveDecision(replacing=reason)
    log.info("%s is there already and valid: kept", target)
    return SaveDecision(skip="it is there already, and valid")


def _reason_to_replace(target: Path, run: str, pool: BlockPool) -> str | None:
    """Why the checkpoint at `target` does not count as a save of this run; None if it does."""
    try:
        existing = verify(target, pool)
    except InvalidCheckpoint as error:
        return f"a newer save of the same step replaced it; it was not valid: {error.reason}"
    if existing.manifest is not None and existing.manifest.run != run:
        return f"run {run!r} saved the same step; this one is of run {existing.manifest.run!r}"
    return None
