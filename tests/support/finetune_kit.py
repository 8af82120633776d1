"""Helpers for tests of `reprieve finetune`: run a job on ranks, stop it, start it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reprieve.testing import Fault, Result, run_ranks
from tests.support.jobs.finetune_jobs import FinetuneJob, finetune
from tests.support.jobs.hf_jobs import PRELOAD

_ENV = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "REPRIEVE_GRACE": "40s", "HF_TOKEN": None}


def run(
    function: Callable[..., None], *args: Any, ranks: int = 1, faults: Sequence[Fault] = (), **env: str
) -> list[Result]:
    """Run a function in forked processes that have imported what it needs."""
    return run_ranks(
        ranks, function, *args, faults=faults, env={**_ENV, **env}, timeout="120s",
        backend="gloo" if ranks > 1 else None, modules=PRELOAD,
    )  # fmt: skip


def start(job: FinetuneJob, *faults: Fault, ranks: int = 1, **env: str) -> list[Result]:
    return run(finetune, job, ranks=ranks, faults=faults, **env)


def finish(job: FinetuneJob, ranks: int = 1) -> list[Result]:
    """Run a start that must finish."""
    results = start(job, ranks=ranks)
    for result in results:
        assert result.ok, str(result)
    return results
