"""Helpers for tests of Hugging Face's trainers: stop a job, resume it, compare it with an undisturbed one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.verify import verify
from reprieve.testing import Fault, Result, run_ranks
from tests.support.jobs.hf_jobs import PRELOAD, HfJob, seen, train

_ENV = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "REPRIEVE_GRACE": "40s"}
_PERMANENT_FAILURES = ("StateMismatch", "ConfigError", "NoValidCheckpoint")
"""A script that raises one of these exits with 42."""

_undisturbed: dict[str, dict[str, Any]] = {}


def attempt(
    job: HfJob,
    *faults: Fault,
    ranks: int = 1,
    fn: Callable[..., None] = train,
    args: tuple[Any, ...] = (),
    **env: str,
) -> list[Result]:
    return run_ranks(
        ranks, fn, job, *args, faults=faults, env={**_ENV, **env}, timeout="120s",
        backend="gloo" if ranks > 1 or job.zero is not None else None,
        modules=PRELOAD,
    )  # fmt: skip


def stopped(job: HfJob, *faults: Fault, ranks: int = 1) -> str:
    """Run an attempt that must be stopped, and return the output of rank 0."""
    results = attempt(job, *faults, ranks=ranks)
    for result in results:
        assert result.exit_code == 143, str(result)
    return results[0].output


def ends(job: HfJob, ranks: int = 1) -> str:
    """Run an attempt that must succeed, and return the output of rank 0."""
    results = attempt(job, ranks=ranks)
    for result in results:
        assert result.ok, str(result)
    return results[0].output


def refused(job: HfJob, *words: str, ranks: int = 1) -> None:
    """Run an attempt that must fail for good with these words in its message, and leave all checkpoints untouched."""
    before = {path: path.stat().st_mtime_ns for path in job.output.glob("checkpoint-*/*")}
    for result in attempt(job, ranks=ranks):
        assert result.error is not None, str(result)
        assert result.error.type in _PERMANENT_FAILURES, str(result)
        for word in words:
            assert word in result.error.message, str(result)
    assert {path: path.stat().st_mtime_ns for path in job.output.glob("checkpoint-*/*")} == before


def train_to_end(job: HfJob, ranks: int = 1) -> dict[str, Any]:
    """Train to the end, and return what all attempts together have recorded."""
    ends(job, ranks)
    return seen(job.folder)


def after(job: HfJob, step: int) -> dict[str, Any]:
    """Return what the last attempt, which resumed from this step, recorded up to step 12, and its weights."""
    found = seen(job.folder)
    for name, lines in found.items():
        if name.startswith("losses"):
            found[name] = [loss for at, loss, _ in lines[-(12 - step) :] if at >= step]
    return {name: what["weights"] if name.startswith("end") else what for name, what in found.items()}


def undisturbed(job: HfJob, ranks: int = 1) -> dict[str, Any]:
    """Return what the same job records without Reprieve. Each job runs once."""
    plain = replace(job, folder="", safe=False, options=())
    key = repr((plain, ranks))
    if key not in _undisturbed:
        with tempfile.TemporaryDirectory() as folder:
            _undisturbed[key] = train_to_end(replace(plain, folder=folder), ranks)
    return _undisturbed[key]


def checkpoints(job: HfJob) -> list[str]:
    return sorted(path.name for path in Path(job.output).glob("checkpoint-*"))


def valid(job: HfJob) -> list[int]:
    """Return the steps of all checkpoints, newest first, and assert that each of them verifies."""
    found = list_checkpoints(job.output)
    for checkpoint in found:
        assert verify(checkpoint.path, BlockPool()).manifest is not None
    assert len(found) == len(checkpoints(job))
    return [checkpoint.step for checkpoint in found]
