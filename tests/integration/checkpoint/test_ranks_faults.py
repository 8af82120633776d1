"""Faults among three ranks: what fails on one fails on all, in time and with its reason, and nothing is lost.

Each scenario is made of real processes. Those that wait for a time limit mostly sleep, so several run side by side.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.paths import LEASE_FOLDER, is_leftover
from reprieve.checkpoint.folder.verify import verify
from reprieve.testing import Fault, Result, fail, kill, pause, run_ranks, start_ranks, values
from tests.support.jobs import rank_fault_jobs as jobs
from tests.support.jobs.rank_fault_jobs import LIMIT_S, Outcome

SOAK = bool(os.environ.get("REPRIEVE_SOAK"))
SLACK_S = 10.0
"""What a busy machine may add to a time limit. A hang takes longer: 30 s in a process group or a store."""

RANKS = 3
SAVE = ("plan", "begin", "write", "flush", "commit")
RESTORE = ("choose", "prepare", "read", "apply")
PLACES = ("before", "publish", "after")

Stall = tuple[int, str, str]
"""(rank, place, operation)"""


def by_call(of_ranks: Sequence[Sequence[Outcome]]) -> list[list[Outcome]]:
    """Outcomes of each call, by rank; all ranks made the same calls."""
    return [list(call) for call in zip(*of_ranks, strict=True)]


def assert_failed_everywhere(call: Sequence[Outcome], *reasons: str, limit_s: float = LIMIT_S) -> None:
    """Check that every rank failed with one of the reasons, and in time."""
    for rank, outcome in enumerate(call):
        assert outcome.type is not None, f"rank {rank} noticed nothing: {call}"
        assert any(reason in f"{outcome.type}: {outcome.message}" for reason in reasons), f"rank {rank}: {call}"
        assert outcome.seconds < limit_s + SLACK_S


def assert_succeeded(call: Sequence[Outcome], value: Any = None) -> None:
    for rank, outcome in enumerate(call):
        assert outcome.type is None, f"rank {rank}: {call}"
        assert outcome.value == value, f"rank {rank}: {call}"
        assert outcome.seconds < SLACK_S


def assert_whole(root: Path, steps: Sequence[int]) -> None:
    """Check that these checkpoints are there and valid, and that nothing else is visible."""
    assert [found.step for found in list_checkpoints(root)] == sorted(steps, reverse=True)
    for step in steps:
        verify(root / f"checkpoint-{step}", BlockPool())
    others = {path.name for path in root.iterdir() if not path.name.startswith("checkpoint-")}
    assert others == {LEASE_FOLDER}


def side_by_side(*scenarios: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(scenarios)) as threads:
        return [done.result() for done in [threads.submit(scenario) for scenario in scenarios]]


def stalls(calls: Sequence[Stall | None], operations: Sequence[str], seconds: float) -> list[Fault]:
    """For each of several calls of save or restore in the same processes: which rank stalls where."""
    faults: list[Fault] = []
    passed: Counter[tuple[int, str]] = Counter()
    for stall in calls:
        if stall is not None:
            rank, place, operation = stall
            at = f"{place} {operation}"
            faults.append(pause(rank, at, seconds, nth=passed[rank, at] + 1))
        for rank in range(RANKS):
            passed.update((rank, point) for point in _points_of(rank, stall, operations))
    return faults


def _points_of(rank: int, stall: Stall | None, operations: Sequence[str]) -> Iterator[str]:
    """The points that a rank passes in a call that ends where another rank stalls."""
    late, place, end = stall if stall is not None else (-1, "", "")
    failing = operations.index(end) + (place == "after") if end else len(operations)
    for number, operation in enumerate(operations[: failing + 1]):
        for here in PLACES:
            # Whoever comes when the others have given up does not begin its work.
            too_late = number == failing and rank == late and place in ("before", "after")
            if not (here == "publish" and too_late):
                yield f"{here} {operation}"


# Saves


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_a_full_disk_of_one_rank(spread: bool, background: bool, tmp_path: Path) -> None:
    steps, full = [1, 2, 3, 4, 5, 5, 6, 7, 8, 9], {2: 1, 4: 0, 6: 2, 8: "commit"}
    results = values(run_ranks(RANKS, partial(jobs.saves, tmp_path, steps, full, spread=spread, background=background)))
    calls = by_call([result[0] for result in results])
    for number, (step, call) in enumerate(zip(steps, calls, strict=True)):
        if step in full:
            assert_failed_everywhere(call, "no room for a checkpoint", limit_s=0)
            on = 0 if full[step] == "commit" else full[step]
            for rank, outcome in enumerate(call):
                assert outcome.type == ("StorageFull" if rank == on else "RankFailed")
                assert outcome.message.count(f"rank {on}: StorageFull: no room") == (rank != on)
        else:
            assert_succeeded(call, "it is there already, and valid" if number == 5 else None)
    assert_succeeded([result[1] for result in results], (9, 9, []))
    assert_whole(tmp_path, [1, 3, 5, 7, 9])


def test_a_rank_that_stalls_in_a_save_or_a_restore(tmp_path: Path) -> None:
    """The other ranks give up after the limit, the stalled one when it wakes up; the next call succeeds on all."""
    in_saves: list[Stall | None] = [None]
    for stall in ((1, "before", "plan"), (0, "publish", "begin"), (2, "publish", "write"), (1, "after", "write"),
                  (2, "before", "commit")):  # fmt: skip
        in_saves += [stall, None]
    in_restores: list[Stall | None] = []
    for stall in ((2, "before", "choose"), (1, "after", "prepare"), (0, "before", "read"), (1, "publish", "apply")):
        in_restores += [stall, None]
    seconds = 2 * LIMIT_S

    def saving(spread: bool, background: bool) -> list[Result]:
        root = tmp_path / f"saves-{spread}-{background}"
        steps = range(1, len(in_saves) + 1)
        job = partial(jobs.saves, root, steps, spread=spread, background=background)
        return run_ranks(RANKS, job, faults=stalls(in_saves, SAVE, seconds), timeout="100s")

    def restoring() -> list[Result]:
        root = tmp_path / "restores"
        values(run_ranks(RANKS, jobs.saves, root, [1, 2]))
        job = partial(jobs.restores, root, len(in_restores))
        return run_ranks(RANKS, job, faults=stalls(in_restores, RESTORE, seconds), timeout="100s")

    *savings, restored = side_by_side(partial(saving, False, False), partial(saving, True, True), restoring)
    for results in savings:
        calls = by_call([result[0] for result in values(results)])
        for call, stall in zip(calls, in_saves, strict=True):
            if stall is None:
                assert_succeeded(call)
            else:
                assert_failed_everywhere(call, f"rank {stall[0]}: did not arrive within 2 s", limit_s=seconds)
                others = [outcome.seconds for rank, outcome in enumerate(call) if rank != stall[0]]
                assert max(others) < LIMIT_S + SLACK_S
        assert_succeeded([result[1] for result in values(results)], (11, 11, []))
    # A rank that is late for the commit keeps rank 0 from saying so, not from doing it.
    whole = [step for step, stall in enumerate(in_saves, 1) if stall is None or stall[2] == "commit"]
    assert_whole(tmp_path / "saves-False-False", whole)
    assert_whole(tmp_path / "saves-True-True", whole)
    for call, stall in zip(by_call(values(restored)), in_restores, strict=True):
        if stall is None:
            assert_succeeded(call, (2, 2, []))
        else:
            # torch looks only every 10 s whether the making of a process group has taken too long.
            assert_failed_everywhere(call, "RankFailed", limit_s=seconds + 10)
    assert_whole(tmp_path / "restores", [1, 2])


def test_nobody_waits_for_a_rank_that_stalls_for_a_minute(tmp_path: Path) -> None:
    values(run_ranks(RANKS, jobs.restore_then_save, tmp_path, 1, backend=None))
    start = time.monotonic()
    faults = [pause(1, "before flush", "60s")]
    with start_ranks(RANKS, jobs.restore_then_save, tmp_path, 2, backend=None, faults=faults) as ranks:
        while not (tmp_path / ".checkpoint-2.saving-2").exists():
            time.sleep(0.01)
        while (tmp_path / ".checkpoint-2.saving-2").exists():
            time.sleep(0.01)
        assert time.monotonic() - start < LIMIT_S + SLACK_S
        ranks.signal(1, signal.SIGKILL)
        results = ranks.wait()
    for rank in (0, 2):
        assert "rank 1: did not arrive within 2 s" in results[rank].value[1].message
    assert_whole(tmp_path, [1])


def test_errors_in_the_background_are_raised_once_at_the_next_call(tmp_path: Path) -> None:
    faults = [pause(2, "before flush", 2 * LIMIT_S, nth=2), fail(0, "publish commit", OSError(5, "broken"), nth=2)]
    calls = by_call(values(run_ranks(RANKS, jobs.background_faults, tmp_path, faults=faults)))
    *saves, waited, restored = calls
    for number in (0, 1, 3, 5, 9):  # begun without an error
        assert_succeeded(saves[number])
    assert_failed_everywhere(saves[2], "no room for a checkpoint")
    assert_failed_everywhere(saves[4], "rank 2: did not arrive within 2 s", limit_s=2 * LIMIT_S)
    assert_failed_everywhere(saves[6], "broken", "I/O error")
    assert [outcome.type for outcome in saves[7]] == [None, "MemoryError", None]
    assert_failed_everywhere(saves[8], "rank 1: MemoryError: no memory")
    assert_succeeded(waited)
    assert_succeeded(restored, (10, 10, []))
    assert_whole(tmp_path, [1, 6, 10])


def test_rank_0_decides_for_all_whether_a_save_is_left_out(tmp_path: Path) -> None:
    faults = [pause(0, "after commit", "1.5s")]
    first, second, third, restored = by_call(values(run_ranks(RANKS, jobs.skips, tmp_path, faults=faults)))
    assert_succeeded(first)
    assert_succeeded(second, "another save was still running")
    assert_succeeded(third)
    assert_succeeded(restored, (3, 3, []))
    assert_whole(tmp_path, [1, 3])


def test_ranks_that_are_not_as_they_should_be(tmp_path: Path) -> None:
    results = run_ranks(RANKS, jobs.disagreements, tmp_path)
    first, steps, steps_again, structure, unsafe, odd, diverged, equal, restored = by_call(values(results))
    assert_succeeded(first, [])
    for call, step in ((steps, 2), (steps_again, 1)):
        assert_failed_everywhere(call, f"different steps: rank 0 at {step}, rank 1 at 3, rank 2 at {step}", limit_s=0)
        assert {outcome.type for outcome in call} == {"StateError"}
    assert_failed_everywhere(
        structure, "StateError: optimizer.pt would have another structure on rank 2 than on rank 0", limit_s=0
    )
    assert_failed_everywhere(unsafe, "UnsafeState: mine.1.pt", limit_s=0)
    assert_failed_everywhere(odd, "could not convert string to float", limit_s=0)
    assert_succeeded(diverged, [("model.large", (2,)), ("optimizer.state.1.momentum_buffer", (1,))])
    for result in results:
        assert "step 5: model.large on rank 2 differs from the other ranks" in result.output
    assert_succeeded(equal, [])
    assert_succeeded(restored, (6, 6, []))
    assert_whole(tmp_path, [1, 5, 6])


# SIGKILL


def _committed(rank: int, place: str, operation: str) -> bool:
    """Whether the save is visible if this rank dies there. Rank 0 does not wait for the others before it commits."""
    if operation == "commit":
        return rank != 0 or place != "before"
    return operation == "flush" and place == "after" and rank != 0


def _die_everywhere(root: Path, rank: int, points: Sequence[tuple[str, str]], background: bool) -> None:
    """Start the job and kill the rank at a point of its save; start it again and kill it at the next point."""
    newest = 1
    values(run_ranks(RANKS, jobs.restore_then_save, root, newest, backend=None))
    for step, (place, operation) in enumerate(points, 2):
        faults = [kill(rank, f"{place} {operation}")]
        results = run_ranks(RANKS, jobs.restore_then_save, root, step, background, backend=None, faults=faults)
        assert results[rank].signal == signal.SIGKILL
        for survivor in values(result for result in results if result.rank != rank):
            restored, saved = survivor
            assert restored.value == (newest, newest, [])
            if (place, operation) == ("after", "commit"):
                assert saved.type is None, saved
            else:
                assert saved.type == "RankFailed", saved
                assert f"rank {rank}: did not arrive within 2 s" in saved.message
                assert saved.seconds < LIMIT_S + SLACK_S
        if _committed(rank, place, operation):
            newest = step
        assert list_checkpoints(root)[0].step == newest, (place, operation)
        verify(root / f"checkpoint-{newest}", BlockPool())
        # What rank 0 did not live to remove is hidden, and goes at the next start.
        assert rank == 0 or not [path for path in root.iterdir() if is_leftover(path)]
    for restored, _ in values(run_ranks(RANKS, jobs.restore_then_save, root, None, backend=None)):
        assert restored.value == (newest, newest, [])
    assert_whole(root, [found.step for found in list_checkpoints(root)])


@pytest.mark.soak
def test_sigkill_at_every_point_of_a_save(tmp_path: Path) -> None:
    points = [(place, operation) for operation in SAVE for place in PLACES]
    side_by_side(*(
        partial(_die_everywhere, tmp_path / f"{rank}-{background}", rank, points if SOAK else points[rank % 2 :: 2],
                background)
        for rank in range(RANKS)
        for background in ((False, True) if SOAK else (rank == 2,))
    ))  # fmt: skip


@pytest.mark.soak
def test_sigkill_at_every_point_of_a_restore(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    values(run_ranks(RANKS, jobs.saves, saved, [1, 2]))
    points = [f"{place} {operation}" for operation in RESTORE for place in PLACES]

    def dies(rank: int) -> None:
        root = tmp_path / str(rank)
        shutil.copytree(saved, root)
        for point in points if SOAK else points[rank::RANKS]:
            results = run_ranks(RANKS, jobs.restore_dying, root, faults=[kill(rank, point)])
            assert results[rank].signal == signal.SIGKILL
            for outcome in values(result for result in results if result.rank != rank):
                if point == "after apply":
                    assert outcome.value == (2, 2, [])
                else:
                    assert outcome.type == "RankFailed", outcome
                assert outcome.seconds < LIMIT_S + SLACK_S
        for call in by_call(values(run_ranks(RANKS, jobs.restores, root, 1))):
            assert_succeeded(call, (2, 2, []))
        assert_whole(root, [1, 2])

    side_by_side(*(partial(dies, rank) for rank in range(RANKS)))


@pytest.mark.soak
def test_sigkill_at_the_start_and_at_the_end(tmp_path: Path) -> None:
    points = [f"{place} {operation}" for operation in ("own", "join", "close") for place in PLACES]

    def dies(rank: int) -> None:
        root = tmp_path / str(rank)
        for point in points if SOAK else points[rank::RANKS]:
            start = time.monotonic()
            results = run_ranks(RANKS, jobs.own_folders, [root] * RANKS, backend=None, faults=[kill(rank, point)])
            assert time.monotonic() - start < 2 * LIMIT_S + SLACK_S
            assert results[rank].signal == signal.SIGKILL
            others = [result for result in results if result.rank != rank]
            if point == "after join" or "close" in point:
                values(others)
            else:
                assert {result.error and result.error.type for result in others} == {"RankFailed"}
            if rank != 0:
                assert json.loads((root / LEASE_FOLDER / "owner.json").read_bytes())["released"]
        values(run_ranks(RANKS, jobs.own_folders, [root] * RANKS, backend=None))

    side_by_side(*(partial(dies, rank) for rank in range(RANKS)))


# The store


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("point", ["before write", "before commit", "before read"])
def test_the_host_of_the_store_is_killed(host: int, point: str, tmp_path: Path) -> None:
    values(run_ranks(RANKS, jobs.restore_then_save, tmp_path, 1, backend=None))
    start = time.monotonic()
    faults = [kill(host, point)]
    results = run_ranks(RANKS, jobs.restore_then_save, tmp_path, 2, backend=None, store_host=host, faults=faults)
    assert time.monotonic() - start < LIMIT_S + SLACK_S
    assert results[host].signal == signal.SIGKILL
    for survivor in values(result for result in results if result.rank != host):
        restored, saved = survivor
        assert saved.type == "StoreLost"
    newest = list_checkpoints(tmp_path)[0].step
    assert newest == 1 or (point == "before commit" and host != 0)
    for restored, _ in values(run_ranks(RANKS, jobs.restore_then_save, tmp_path, None, backend=None)):
        assert restored.value == (newest, newest, [])
    assert_whole(tmp_path, range(1, newest + 1))


# Bad blocks


def test_a_bad_block_that_only_one_rank_reads(tmp_path: Path) -> None:
    """All ranks fall back together, each time to the next older checkpoint."""
    values(run_ranks(RANKS, jobs.saves, tmp_path, range(1, 9)))
    bad = [
        (1, 8, "mine.1.pt", "stuck"),
        (1, 8, "model.safetensors", "flipped"),  # read together
        (2, 7, "optimizer.pt", "EIO"),
        (1, 6, "mine.1.pt", "flipped"),  # nobody else reads it
        (2, 5, "rng_state_2.pth", "EIO"),
        (0, 4, "model.buffers.0.pt", "flipped"),
        (0, 3, "model.safetensors", "EIO"),
        (1, 2, "mine.1.pt", "EIO"),
        (2, 1, "mine.2.pt", "flipped"),
    ]
    calls = by_call(values(run_ranks(RANKS, jobs.restore_with_bad_blocks, tmp_path, bad)))
    assert_failed_everywhere(calls[0], "Read-only file system", "mounted read-only", limit_s=0)
    for call, (_, step, name, how) in zip(calls[1:-1], bad[1:-1], strict=True):
        assert_succeeded(
            [Outcome(outcome.value[:2], outcome.type, outcome.message, outcome.seconds) for outcome in call],
            (step - 1,) * 2,
        )
        reported = [outcome.value[2] for outcome in call]
        assert reported[0] == reported[1] == reported[2]
        (newest, *_) = reported[0]
        assert newest.startswith(f"checkpoint-{step}: {name} ")
        assert ("is damaged" if how == "flipped" else "cannot be read") in newest
    assert_failed_everywhere(calls[-1], "NoValidCheckpoint: there are checkpoints in", limit_s=0)
    assert {found.step for found in list_checkpoints(tmp_path) if found.is_quarantined} == set(range(1, 9))


def test_a_bad_block_in_the_shard_of_one_rank(tmp_path: Path) -> None:
    values(run_ranks(RANKS, partial(jobs.saves, tmp_path, [1, 2], spread=True)))
    with (tmp_path / "checkpoint-2" / "model.safetensors").open("r+b") as file:
        file.seek(500 * 4096)  # of 601 rows
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    (call,) = by_call(values(run_ranks(RANKS, partial(jobs.restores, tmp_path, 1, spread=True))))
    (reported,) = {reason for outcome in call for reason in outcome.value[2]}
    assert reported.startswith("checkpoint-2: model.safetensors is damaged: block ")
    assert_succeeded(call, (1, 1, [reported]))


# The folder


def test_a_folder_that_only_rank_0_sees(tmp_path: Path) -> None:
    start = time.monotonic()
    shared, own = tmp_path / "shared", tmp_path / "own"
    results = run_ranks(RANKS, jobs.own_folders, [shared, own, shared], backend=None)
    assert time.monotonic() - start < 2 * LIMIT_S + SLACK_S
    for result in results:
        assert result.error is not None
        assert result.error.type == ("StorageError" if result.rank == 1 else "RankFailed")
        for word in ("rank 1 on ", os.uname().nodename, str(own), "a folder that all of them share", "ReadWriteMany"):
            assert word in result.error.message
    assert json.loads((shared / LEASE_FOLDER / "owner.json").read_bytes())["released"]
    assert not own.exists()
    values(run_ranks(RANKS, jobs.own_folders, [shared] * RANKS, backend=None))


def test_a_folder_that_one_rank_loses(tmp_path: Path) -> None:
    root, link = tmp_path / "checkpoints", tmp_path / "mount"
    root.mkdir()
    link.symlink_to(root)
    first, lost, again, restored = by_call(values(run_ranks(RANKS, jobs.lose_the_folder, root, link)))
    assert_succeeded(first)
    assert_failed_everywhere(lost, f"cannot use {link} for checkpoints: No such file", f"{link} is gone", limit_s=0)
    assert_succeeded(again)
    assert_succeeded(restored, (3, 3, []))
    assert_whole(root, [1, 3])


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_a_newer_attempt_fences_an_older_one(in_the_middle: bool, tmp_path: Path) -> None:
    root, signs = tmp_path / "checkpoints", tmp_path / "signs"
    signs.mkdir()
    older = (
        partial(jobs.older_attempt_in_the_middle, root, signs)
        if in_the_middle
        else partial(jobs.older_attempt, root, signs, False)
    )
    with start_ranks(RANKS, older) as first:
        while not (signs / "older is there").exists():
            time.sleep(0.02)
        with start_ranks(RANKS, jobs.newer_attempt, root, signs) as second:
            old = values(first.wait())
            (signs / "older has ended").touch()
            new = values(second.wait())
    assert [attempt for attempt, _ in old] == [1] * RANKS
    assert [attempt for attempt, _ in new] == [2] * RANKS
    for call in by_call([outcomes for _, outcomes in old]):
        assert_failed_everywhere(call, "now belongs to run 'r', attempt 2", limit_s=20)
        assert call[0].type == "Fenced"
        assert {outcome.type for outcome in call} <= {"Fenced", "RankFailed"}
    restored, again, third, last = by_call([outcomes for _, outcomes in new])
    assert_succeeded(restored, (1, 1, []))
    assert_succeeded(again)
    assert_succeeded(third)
    assert_succeeded(last, (3, 3, []))
    assert {path.name for path in root.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3)}
    for step in (1, 2, 3):
        verify(root / f"checkpoint-{step}", BlockPool())


# Kinds of state


@pytest.mark.fsdp
def test_running_statistics(tmp_path: Path) -> None:
    """DDP broadcasts rank 0's buffers at the next step; without DDP, each rank gets its own buffers back."""
    saved = values(run_ranks(2, partial(jobs.norms_of_all_kinds, tmp_path, restore=False)))
    restored = values(run_ranks(2, partial(jobs.norms_of_all_kinds, tmp_path, restore=True)))
    for kind in ("broadcast", "each", "fsdp"):
        assert not torch.equal(saved[0][kind]["norm.running_mean"], saved[1][kind]["norm.running_mean"])
        for rank in (0, 1):
            want = saved[0 if kind == "broadcast" else rank][kind]
            assert set(want) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
            assert all(torch.equal(restored[rank][kind][key], want[key]) for key in want), (kind, rank)


def test_a_placement_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    for result in run_ranks(2, jobs.sharded_by_columns, tmp_path):
        assert result.error is not None
        assert result.seconds < LIMIT_S + SLACK_S
        for word in ("StateError", "columns", "S(1)", "reprieve.dcp"):
            assert word in f"{result.error.type}: {result.error.message}"
    assert not list(tmp_path.glob("*checkpoint*"))


@pytest.mark.fsdp
def test_transformers_loads_what_shards_were_saved_as(tmp_path: Path) -> None:
    values(run_ranks(2, jobs.hugging_face, tmp_path, timeout="200s"))


TRAINING = """
import os, signal, sys
import torch
from reprieve import Checkpointer
from reprieve.ranks import failpoints

def die_in_the_middle(point):
    if point == "publish write":
        os.kill(os.getpid(), signal.SIGKILL)

def say(line):  # in one write: two ranks share the output
    os.write(1, f"{line}\\n".encode())

rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = torch.Generator().manual_seed(0)
with Checkpointer(sys.argv[1], model=model, data=data, rank_timeout="30s") as checkpointer:
    resumed = checkpointer.restore()
    for step in range(resumed.step if resumed else 0, 6):
        loss = model(torch.randn(3, 4, generator=data)).square().mean()
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()])):
            parameter.data.sub_(gradient)
        if (rank, start, step) == ("1", "0", 3):
            failpoints.on_reached = die_in_the_middle
        checkpointer.save(step + 1)
        say(f"rank {rank} of start {start}, attempt {checkpointer.attempt}: step {step + 1}")
say(f"rank {rank} ends with {model.weight.flatten().tolist()}")
"""


def test_torchrun_starts_it_again_and_it_goes_on(tmp_path: Path) -> None:
    """One rank is killed in a save; torchrun ends the other and restarts both, with the same store."""
    script, root = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*command, str(script), str(root)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    torch.manual_seed(0)
    model, data = torch.nn.Linear(4, 2), torch.Generator().manual_seed(0)
    for _ in range(6):
        loss = model(torch.randn(3, 4, generator=data)).square().mean()
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
        ):
            parameter.data.sub_(gradient)
    steps = [(0, 1, 1), (0, 1, 2), (0, 1, 3), (1, 2, 4), (1, 2, 5), (1, 2, 6)]
    assert lines == sorted(
        line
        for rank in (0, 1)
        for line in (
            *(f"rank {rank} of start {start}, attempt {attempt}: step {step}" for start, attempt, step in steps),
            f"rank {rank} ends with {model.weight.flatten().tolist()}",
        )
    )
    assert_whole(root, [4, 5, 6])
