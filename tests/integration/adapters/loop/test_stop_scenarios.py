"""What can come together with a stop: more signals, other saves, slow and full disks, short grace periods, dead ranks.

Each test looks at the exit code, at what a person would look for in the output, at the checkpoints that are left, and
where the job goes on, that it has seen in the end what the same script sees without Reprieve.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from reprieve.testing import Result, fail, full_disk, kill, pause, run_ranks, slow_disk, start_ranks, terminate
from tests.support.jobs.loop_jobs import Job, train
from tests.support.jobs.stop_scenario_jobs import (
    WIDE_BYTES,
    attempt,
    checkpoints,
    only_steps,
    seen,
    steps_seen,
    told,
    undisturbed,
    wide,
)

SOAK = bool(os.environ.get("REPRIEVE_SOAK"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(str(tmp_path / "job"), epochs=2)


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not true():
        assert time.monotonic() < end, "it does not train"
        time.sleep(0.01)


def _stopped(result: Result, *said: str) -> None:
    assert result.exit_code == 143, str(result)
    for words in said:
        assert words in result.output, result.output


def _goes_on(job: Job, fn: Callable[..., None] = train) -> None:
    result = attempt(job, fn=fn)
    assert result.ok, str(result)
    assert seen(job.folder) == undisturbed(job, fn=fn)


# More than one signal


@pytest.mark.parametrize("apart_s", [0.05, 1.0])
def test_sigterm_twice(job: Job, apart_s: float) -> None:
    """The second comes while the last save of about 1.5 s runs. It changes nothing."""
    with start_ranks(
        1, wide, replace(job, step_s=0.05), backend=None, faults=[slow_disk(0, WIDE_BYTES * 2 // 3)]
    ) as ranks:
        _until(lambda: steps_seen(job) >= 3)
        ranks.signal(0, signal.SIGTERM)
        time.sleep(apart_s)
        ranks.signal(0, signal.SIGTERM)
        [result] = ranks.wait()
    _stopped(result, "stop requested: SIGTERM", "saved step")
    assert result.output.count("stop requested: ") == 1
    assert checkpoints(job) == [steps_seen(job)]
    _goes_on(job, wide)


@pytest.mark.parametrize("at", ["before write", "before commit", "before leave"])
def test_sigterm_during_the_last_save(job: Job, at: str) -> None:
    _stopped(attempt(job, *told(4), terminate(0, at)), "saved step 4")
    assert checkpoints(job) == [4]
    _goes_on(job)


def test_sigkill_right_after_sigterm(job: Job) -> None:
    """At every stage of the last save: what was there before is still whole, and the next start goes on from it."""
    _stopped(attempt(job, *told(2)), "saved step 2")
    expected = [2]
    for at in ("before stop", "before plan", "before begin", "before write", "before flush", "before commit"):
        result = attempt(job, *told(2), kill(0, at))
        assert result.signal == signal.SIGKILL, str(result)
        assert checkpoints(job) == expected
    result = attempt(job, *told(2), kill(0, "after commit"))
    assert result.signal == signal.SIGKILL, str(result)
    assert checkpoints(job) == [4, 2]
    _goes_on(job)


# A periodic save is running


def test_without_a_deadline_the_running_save_is_finished_and_a_newer_one_made(job: Job) -> None:
    job = replace(job, every=4, step_s=0.02)
    slow = slow_disk(0, WIDE_BYTES)
    result = attempt(job, slow, terminate(0, "before write"), fn=wide)
    newest, running = checkpoints(job)
    _stopped(result, f"saved step {newest} ")
    assert (newest > 4, running) == (True, 4)
    _goes_on(job, wide)


def test_with_time_for_one_save_the_running_one_is_given_up_for_a_newer_one(job: Job) -> None:
    """A save takes about 1.5 s. The second has just begun; 3.2 s are not enough for the rest of it and another one."""
    job = replace(job, every=4, grace=3.2, step_s=0.02)
    slow = slow_disk(0, WIDE_BYTES * 2 // 3)
    result = attempt(job, slow, terminate(0, "before write", nth=2), fn=wide)
    newest, before = checkpoints(job)
    _stopped(result, "giving up the running periodic save", f"saved step {newest} ")
    assert (newest > 8, before) == (True, 4)
    _goes_on(job, wide)


def test_with_time_only_for_the_running_save_that_one_is_finished(job: Job) -> None:
    """All of it is written but the end; a newer one of 1.2 s would not fit into what is left."""
    job = replace(job, every=16, epochs=6, step_s=0.1, grace=1.4)
    late = [terminate(0, "before flush", nth=2), pause(0, "before flush", 0.4, nth=2)]
    result = attempt(job, slow_disk(0, WIDE_BYTES * 5 // 6), *late, fn=wide)
    _stopped(result, " IS NOT SAVED: ", "Finishing the running save of an older step instead")
    assert checkpoints(job) == [32, 16]
    _goes_on(replace(job, step_s=0.0), wide)


# Disks


def test_a_grace_period_that_is_too_short(job: Job) -> None:
    _stopped(attempt(job, *told(2), fn=wide))
    short = replace(job, grace=2.5, step_s=0.05)
    with start_ranks(1, wide, short, backend=None, faults=[slow_disk(0, WIDE_BYTES // 8)]) as ranks:
        _until(lambda: steps_seen(job) >= 5)
        ranks.signal(0, signal.SIGTERM)
        signalled = time.monotonic()
        [result] = ranks.wait()
    assert time.monotonic() - signalled < 2.5
    _stopped(result, "THE GRACE PERIOD IS TOO SHORT to save step", "the grace period is over: ending the process now")
    assert checkpoints(job) == [2]
    _goes_on(job, wide)


def test_a_disk_that_fills_during_the_last_save(job: Job) -> None:
    _stopped(attempt(job, *told(2), fn=wide))
    result = attempt(job, full_disk(0, WIDE_BYTES // 2), *told(3), fn=wide)
    _stopped(result, "step 5 could not be saved: no room for a checkpoint", "resumes from the newest valid checkpoint")
    assert checkpoints(job) == [2]
    _goes_on(job, wide)


@pytest.mark.parametrize("at", ["before begin", "before write"], ids=["at once", "in the background"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_periodic_save_that_fails_ends_nothing(job: Job, ranks: int, at: str) -> None:
    """Training goes on, and the last save is made all the same."""
    periodic = replace(job, every=3, kind="ddp" if ranks > 1 else "plain", epochs=2 * ranks)
    full = fail(ranks - 1, at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    options = {"backend": "gloo" if ranks > 1 else None}
    for result in run_ranks(ranks, train, periodic, faults=[full, *told(5)], **options):
        _stopped(result, "saved step 5")
        assert "is not saved" in result.output or "failed: " in result.output, result.output
    assert checkpoints(job) == [5]
    for result in run_ranks(ranks, train, periodic, **options):
        assert result.ok, str(result)


@pytest.mark.soak
def test_a_rank_that_takes_long_to_save(job: Job) -> None:
    """The other one is done at once, and waits: who ends first takes the others with it under torchrun."""
    seconds = 40 if SOAK else 4
    job = replace(job, kind="ddp", grace=90)
    faults = [*told(3), slow_disk(1, 28_000 // seconds)]
    first, slow = run_ranks(2, train, job, faults=faults, timeout="100s")
    _stopped(first, "saved step 3")
    _stopped(slow, "saved step 3")
    assert seconds - 1 < slow.seconds
    assert abs(first.seconds - slow.seconds) < 2.0
    assert checkpoints(job) == [3]
    results = run_ranks(2, train, job)
    assert all(result.ok for result in results), str(results[0])
    assert seen(job.folder, 2) == undisturbed(job, 2)


# Set-up


def test_a_signal_while_other_ranks_are_not_there_yet(job: Job) -> None:
    """Rank 0 hears it in its Run, which waits for rank 1. Both train nothing, and leave together."""
    job = replace(job, kind="ddp")
    results = run_ranks(2, train, job, faults=[pause(1, "before own", 2), terminate(0, "before own")])
    for result in results:
        _stopped(result, "stop requested: ", "nothing to save")
    assert checkpoints(job) == []
    results = run_ranks(2, train, job)
    assert all(result.ok for result in results), str(results[0])
    assert seen(job.folder, 2) == undisturbed(job, 2)


def test_a_signal_before_run_is_made(job: Job) -> None:
    """Nobody listens yet: it ends that process, as it would without Reprieve, and the others end by themselves."""
    job = replace(job, options=(("rank_timeout", 1), ("take_over_after", 1)))
    killed, waiting = run_ranks(2, train, job, faults=[terminate(0, "set-up")])
    assert killed.signal == signal.SIGTERM
    assert waiting.exit_code == 1
    assert waiting.error is not None
    assert "rank 0: did not arrive within" in waiting.error.message
    assert checkpoints(job) == []


# Before the first step of a process


@pytest.mark.parametrize("at", ["before apply", "fetch", "forward"])
def test_nothing_is_waited_for_while_nothing_was_trained(job: Job, at: str) -> None:
    """What was saved before is loaded, a batch is fetched, the first step compiles: each may take minutes."""
    _stopped(attempt(job, *told(4)), "saved step 4")
    hurried = replace(job, options=(("exit_wait", 1),))
    result = attempt(hurried, terminate(0, at), pause(0, at, 30))
    _stopped(result, "no step was done since the start")
    assert result.seconds < 20
    assert checkpoints(job) == [4]
    _goes_on(job)


def test_a_step_that_was_done_is_waited_for(job: Job) -> None:
    """Without a loader, the first boundary comes after the first step."""
    hurried = replace(job, options=(("exit_wait", 1),))
    _stopped(attempt(hurried, terminate(0, "forward", nth=2), pause(0, "forward", 3, nth=2), fn=only_steps, args=(5,)))
    assert checkpoints(job) == [2]


def test_a_rank_in_its_first_step_is_waited_for_by_those_ahead(job: Job) -> None:
    """They have trained, and there is something to save."""
    job = replace(job, kind="plain", options=(("exit_wait", 1),))
    faults = [pause(1, "forward", 5), terminate(0, "forward", nth=6), pause(0, "forward", 1, nth=6)]
    results = run_ranks(2, train, job, faults=faults)
    for result in results:
        _stopped(result, "saved step")
    [step] = checkpoints(job)
    assert step >= 5


# A script that fails, ranks that die


def test_a_script_that_raises(job: Job) -> None:
    job = replace(job, every=5)
    result = attempt(job, slow_disk(0, WIDE_BYTES), fail(0, "forward", ValueError("bad sample"), nth=7), fn=wide)
    assert result.exit_code == 1
    assert "ValueError: bad sample" in result.output
    assert checkpoints(job) == [5]
    _goes_on(job, wide)


@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_one_of_two_ranks_raises(job: Job, kind: str) -> None:
    """With collectives the other notices at once; without, when it wants to save."""
    job = replace(job, kind=kind, every=3, options=(("rank_timeout", 2),))
    other, raised = run_ranks(2, train, job, faults=[fail(1, "forward", ValueError("bad sample"), nth=5)])
    assert raised.exit_code == 1
    assert "ValueError: bad sample" in raised.output
    assert other.exit_code == 1
    assert other.error is not None
    assert ("closed by peer" in other.output) if kind == "ddp" else ("rank 1" in other.error.message)
    assert other.seconds < raised.seconds + 12
    assert checkpoints(job) == [3]


def _missed(rank: int, result: Result) -> bool:
    """Two look out for it, with the same patience: whoever waits for its answer, and whoever listens for its heart."""
    return any(f"rank {rank}: {how}" in result.output for how in ("did not answer", "sent no heartbeat for 3 s"))


@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_a_rank_is_killed_and_then_another_told_to_stop(job: Job, kind: str) -> None:
    job = replace(job, kind=kind, every=2, epochs=30, step_s=0.05, options=(("rank_timeout", 3), ("exit_wait", 2)))
    faults = [kill(2, "backward", nth=4), terminate(0, "backward", nth=4)]
    *survivors, killed = run_ranks(3, train, job, faults=faults)
    assert killed.signal == signal.SIGKILL
    for result in survivors:
        assert result.exit_code == 1, str(result)
        assert "gloo" in result.output if kind == "ddp" else _missed(2, result)
        assert result.seconds < killed.seconds + 15
    assert checkpoints(job) == [2]


def test_survivors_that_hang_in_a_collective(job: Job) -> None:
    """Rank 2 stands still, and the process group would wait for ten minutes."""
    patience = (("rank_timeout", 3), ("exit_wait", 2))
    job = replace(job, kind="ddp", every=20, epochs=1000, step_s=0.02, options=patience)
    with start_ranks(3, train, job, group_timeout="10m") as ranks:
        _until((Path(job.folder) / "checkpoints" / "checkpoint-20").exists)
        ranks.signal(2, signal.SIGSTOP)
        time.sleep(0.3)
        ranks.signal(0, signal.SIGTERM)
        _until_ended(ranks.pids[:2], within_s=20)
        ranks.signal(2, signal.SIGKILL)
        *survivors, _ = ranks.wait()
    for result in survivors:
        assert result.exit_code == 1, str(result)
        assert _missed(2, result)
    assert checkpoints(job) == [20]


def _until_ended(pids: list[int], within_s: float) -> None:
    end = time.monotonic() + within_s
    for pid in pids:
        pidfd = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([pidfd], [], [], max(0.0, end - time.monotonic()))
        finally:
            os.close(pidfd)
        assert ended, f"it still runs after {within_s:g} s"
