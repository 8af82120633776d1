"""Interrupted runs see what undisturbed ones see, bit for bit: every loss, every evaluation, the final weights."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reprieve.testing import terminate
from tests.support.jobs.loop_jobs import Job, seen_by
from tests.support.launchers import Forked, Spawned, steps_seen, wait_for_steps
from tests.support.pairwise import covering, everything

SOAK = bool(os.environ.get("REPRIEVE_SOAK"))


class Case(NamedTuple):
    """One cell of the matrix."""

    kind: str
    signals: str
    workers: int
    accumulate: int
    feature: str

    @property
    def ranks(self) -> int:
        return {"plain": 1, "ddp 2": 2, "ddp 3": 3, "fsdp 2": 2}[self.kind]

    def job(self, folder: Path) -> Job:
        features = {name: name == self.feature for name in ("dropout", "augment", "collator", "norm")}
        # Workers are forked in each epoch, which takes longer than the epoch. Fewer epochs have to last as long.
        epochs, step_s = (4, 0.02) if SOAK or self.accumulate > 1 else (2, 0.04)
        # FSDP2 on gloo does not shard BatchNorm's buffers, and each rank has its own.
        return Job(
            str(folder), kind=self.kind.split()[0], workers=self.workers, accumulate=self.accumulate, step_s=step_s,
            epochs=epochs * self.ranks, **features,
        )  # fmt: skip


CHOICES: list[tuple[Any, ...]] = [
    ("plain", "ddp 2", "ddp 3", "fsdp 2") if SOAK else ("plain", "ddp 2", "fsdp 2"),
    ("parent", "one", "all", "apart") if SOAK else ("one", "all", "apart"),
    (0, 2, 4) if SOAK else (0, 2),
    (1, 4),
    ("dropout", "augment", "collator", "norm"),
]


CASES = [Case(*case) for case in (everything(CHOICES) if SOAK else covering(CHOICES))]
if not SOAK:
    CASES += [Case("ddp 3", "one", 4, 1, "augment")]
    # torchrun and its ranks import torch, in 5 s of CPU time each: as few cases as meet every other choice.
    CASES += [
        Case("plain", "parent", 2, 4, "augment"),
        Case("plain", "parent", 0, 1, "collator"),
        Case("ddp 2", "parent", 0, 4, "dropout"),
        Case("fsdp 2", "parent", 2, 1, "norm"),
    ]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace(" ", ""))
def test_the_matrix(case: Case, tmp_path: Path) -> None:
    job = case.job(tmp_path / "job")
    assert Forked(job.plain(), case.ranks).wait() == [0] * case.ranks
    # A parent that passes signals on is torchrun; everything else needs no 5 s to start.
    start = Spawned if case.signals == "parent" else Forked
    rng = random.Random(str(case))
    total = steps_seen(job.plain())
    for number in range(2 if start is Forked or SOAK else 1):
        running = start(job, case.ranks)
        # Not in the last steps: it would be finished before the signal comes.
        wait_for_steps(job, steps_seen(job) + rng.randint(1, max(1, total // 4)))
        before = steps_seen(job)
        if case.signals == "parent":
            assert isinstance(running, Spawned)
            running.signal_parent()
        else:
            first = rng.randrange(case.ranks)
            told = [first] if case.signals == "one" else sorted(range(case.ranks), key=lambda rank: rank != first)
            for rank in told:
                running.signal(rank)
                if case.signals == "apart" and rank != told[-1]:
                    time.sleep(0.7)
        assert running.wait() == [143] * case.ranks, f"interruption {number}"
        assert steps_seen(job) >= before
    end = start if SOAK else Forked
    assert end(job, case.ranks).wait() == [0] * case.ranks
    check_equal(job, case.ranks)


def check_equal(job: Job, ranks: int) -> None:
    seen, expected = seen_by(job.folder, ranks), seen_by(job.plain().folder, ranks)
    for rank in range(ranks):
        for line, wanted in zip(seen[rank], expected[rank], strict=False):
            assert line == wanted, f"rank {rank}"
        assert len(seen[rank]) == len(expected[rank]), f"rank {rank}"


PHASES = ("fetch", "forward", "backward", "optimizer", "evaluation", "publish begin", "publish commit")
"""Where a chain is interrupted: points that the job passes, and points of its periodic saves."""

CHAINS = {
    "plain": (1, {"evaluate_every": 3, "epochs": 8}),
    "workers": (1, {"workers": 2, "persistent": True, "evaluate_every": 4, "epochs": 8, "gan": True}),
    "iterable": (1, {"workers": 2, "iterable": True, "accumulate": 2, "epochs": 14}),
    "ddp": (3, {"kind": "ddp", "workers": 2, "evaluate_every": 5, "epochs": 20}),
    "fsdp": (2, {"kind": "fsdp", "accumulate": 2, "norm": False, "evaluate_every": 3, "epochs": 32}),
}
SEEDS = range(10) if SOAK else range(1)
INTERRUPTIONS = 20 if SOAK else 8


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_interruptions(name: str, seed: int, tmp_path: Path) -> None:
    """One job, stopped several times at instants drawn over all its phases, and compared once at its end."""
    ranks, options = CHAINS[name]
    epochs = options["epochs"] if SOAK else options["epochs"] // 2
    job = Job(str(tmp_path / "job"), every=3, **options | {"epochs": epochs})
    assert Forked(job.plain(), ranks).wait() == [0] * ranks
    rng = random.Random(f"{name} {seed}")
    phases = ("set-up", *PHASES) if ranks == 1 else PHASES
    for number in range(INTERRUPTIONS):
        at, rank = rng.choice(phases), rng.randrange(ranks)
        nth = 1 if at == "set-up" or at.startswith("publish") else rng.randint(1, 3)
        codes = Forked(job, ranks, faults=[terminate(rank=rank, at=at, nth=nth)]).wait()
        # Before there is a Run the signal ends the process, as it ends any.
        assert codes == ([-15] if at == "set-up" else [143] * ranks), f"interruption {number}, at {at} {nth}"
    # Told when all is done and only to be written down: that is finished.
    assert Forked(job, ranks, faults=[terminate(rank=0, at="before finish")]).wait() == [0] * ranks
    check_equal(job, ranks)
