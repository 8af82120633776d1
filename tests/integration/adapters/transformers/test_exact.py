"""Hugging Face's trainers, stopped at any moment: losses, logs, best checkpoint and weights as without Reprieve."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from reprieve.testing import Fault, pause, terminate
from tests.support.hf_kit import attempt, stopped, train_to_end, undisturbed
from tests.support.hf_trainers import WITHOUT_TRL
from tests.support.jobs.hf_jobs import HfJob
from tests.support.jobs.stop_scenario_jobs import told
from tests.support.pairwise import covering, everything

SOAK = bool(os.environ.get("REPRIEVE_SOAK"))


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    return HfJob(str(tmp_path / "job"))


@pytest.mark.parametrize("nth", [1, 4, 15, 16, 30])
def test_in_a_step(job: HfJob, nth: int) -> None:
    """30 steps in two epochs: the 15th is the last of an epoch."""
    stopped(job, *told(nth))
    assert train_to_end(job) == undisturbed(job)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_in_an_evaluation(job: HfJob, nth: int) -> None:
    stopped(job, *told(nth, "prediction"))
    assert train_to_end(job) == undisturbed(job)


class Case(NamedTuple):
    """A cell of the matrix."""

    trainer: str
    ranks: int
    data: str
    workers: int


CHOICES = [("trainer", "mlm", "packed", "lora"), (1, 2, 3) if SOAK else (1, 2), ("map", "stream"), (0, 2)]
CASES = [Case(*case) for case in (everything(CHOICES) if SOAK else covering(CHOICES))]
CASES += [] if SOAK else [Case("trainer", 3, "map", 0), Case("mlm", 3, "stream", 2)]


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3) if SOAK else range(1))
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_matrix(case: Case, seed: int, tmp_path: Path) -> None:
    """Stop several times at random, in training, evaluations and periodic saves, through any rank."""
    rng = random.Random(f"{case} {seed}")
    job = HfJob(
        str(tmp_path / "job"), trainer=case.trainer, stream=case.data == "stream", workers=case.workers,
        model=rng.choice(["gpt2", "llama", "qwen2"]), samples=47 if case.trainer in WITHOUT_TRL else 48,
    ).but(per_device_eval_batch_size=2, metric_for_best_model="loss")  # fmt: skip
    if case.trainer not in WITHOUT_TRL:
        job = job.but(accelerator_config={"dispatch_batches": False})  # with packing, stock supports nothing else
    for number in range(4 if SOAK else 2):
        fault = _at_random(rng, case.ranks)
        results = attempt(job, *fault, ranks=case.ranks)
        codes = {result.exit_code for result in results}
        # Later attempts may have too little left to train.
        assert codes == {143} or (number and codes == {0}), f"{number} {fault} {[str(result) for result in results]}"
    expected = undisturbed(job, case.ranks)
    assert expected["end-0.json"]["best_metric"] is not None
    assert train_to_end(job, case.ranks) == expected


def _at_random(rng: random.Random, ranks: int) -> list[Fault]:
    """Signal at one of the next steps. The job stops there or at a later one."""
    at, last = rng.choice([("forward", 6), ("forward", 6), ("prediction", 2), ("publish begin", 1)])
    rank, nth = 0 if at == "publish begin" else rng.randrange(ranks), rng.randint(1, last)
    heard = [pause(rank, at, 0.2, nth=nth)] if rng.random() < 0.5 else []
    return [terminate(rank, at, nth=nth), *heard]


def test_started_again_after_the_end(tmp_path: Path) -> None:
    """The evaluation comes last: TRL's last log line depends on it, also in an attempt that trains nothing."""
    job = HfJob(str(tmp_path / "job"), trainer="packed", samples=48)
    train_to_end(job)
    assert train_to_end(job) == undisturbed(job)


@pytest.mark.parametrize("model", ["llama", "qwen2", "mixtral", "qwen2_moe"])
def test_every_model(tmp_path: Path, model: str) -> None:
    job = HfJob(str(tmp_path / "job"), model=model)
    stopped(job, *told(5))
    assert train_to_end(job) == undisturbed(job)


@pytest.mark.parametrize("at", [("forward", 5), ("prediction", 1)], ids=lambda at: f"{at[0]}-{at[1]}")
@pytest.mark.parametrize("trainer", ["seq2seq", "dpo", "reward"])
def test_other_trainers(tmp_path: Path, trainer: str, at: tuple[str, int]) -> None:
    job = HfJob(str(tmp_path / "job"), trainer=trainer, samples=40)
    stopped(job, *told(at[1], at[0]))
    assert train_to_end(job) == undisturbed(job)


@pytest.mark.parametrize("trainer", ["first_adapter", "both_adapters"])
def test_several_adapters(tmp_path: Path, trainer: str) -> None:
    """Stock loads only the adapters in subfolders, and activates a single one."""
    job = HfJob(str(tmp_path / "job"), trainer=trainer, model="llama")
    stopped(job, *told(5))
    assert train_to_end(job) == undisturbed(job)


@pytest.mark.parametrize("nth", [3, 4, 6])
def test_grpo_between_its_generations(tmp_path: Path, nth: int) -> None:
    """Four steps train on the same batch of generations."""
    job = HfJob(str(tmp_path / "job"), trainer="grpo", samples=20).but(num_train_epochs=1)
    stopped(job, *told(nth))
    assert train_to_end(job) == undisturbed(job)
