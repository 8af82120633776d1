"""What tests of Hugging Face's trainers do with a job: stop it, go on with it, hold it against an undisturbed one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reprieve.testing import Fault, Result, run_ranks

from .hf_jobs import PRELOAD, PRELOAD_TRL, HfJob, seen, train
from .hf_trainers import WITHOUT_TRL

_ENV = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "REPRIEVE_GRACE": "40s"}
_undisturbed: dict[str, dict[str, Any]] = {}


def attempt(
    job: HfJob,
    *faults: Fault,
    ranks: int = 1,
    fn: Callable[..., None] = train,
    args: tuple[Any, ...] = (),
    modules: Sequence[str] = (),
    **env: str,
) -> list[Result]:
    return run_ranks(
        ranks, fn, job, *args, faults=faults, env={**_ENV, **env}, timeout="120s",
        backend="gloo" if ranks > 1 else None,
        modules=modules or (PRELOAD if job.trainer in WITHOUT_TRL else PRELOAD_TRL),
    )  # fmt: skip


def stopped(job: HfJob, *faults: Fault, ranks: int = 1) -> str:
    """What rank 0 says."""
    results = attempt(job, *faults, ranks=ranks)
    for result in results:
        assert result.exit_code == 143, str(result)
    return results[0].output


def goes_on(job: HfJob, ranks: int = 1) -> dict[str, Any]:
    """To its end: what all attempts together have seen."""
    for result in attempt(job, ranks=ranks):
        assert result.ok, str(result)
    return seen(job.folder)


def undisturbed(job: HfJob, ranks: int = 1) -> dict[str, Any]:
    """The same without Reprieve; each once."""
    plain = replace(job, folder="", safe=False, options=())
    key = repr((plain, ranks))
    if key not in _undisturbed:
        with tempfile.TemporaryDirectory() as folder:
            for result in attempt(replace(plain, folder=folder), ranks=ranks):
                assert result.ok, str(result)
            _undisturbed[key] = seen(folder)
    return _undisturbed[key]


def checkpoints(job: HfJob) -> list[str]:
    return sorted(path.name for path in Path(job.output).glob("checkpoint-*"))
