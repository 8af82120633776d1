"""What nobody announces, or announces too late: killed workers, a killed controller, a job that is stopped in 3 s."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import pytest

from tests.support.ray_lab import DriverEnd, RayLab

pytestmark = pytest.mark.timeout(600)

TOO_LATE = "not all workers have saved before the deadline of the driver"
JOB_STOP_S = 3
"""`RAY_JOB_STOP_WAIT_TIME_S` of Ray, by default."""


@pytest.mark.parametrize("way", ["should_checkpoint", "run"])
def test_a_killed_worker_costs_one_failure_and_the_steps_since_its_checkpoint(lab: RayLab, way: str) -> None:
    plan = [{"at": "forward", "step": step, "target": f"rank {rank} SIGKILL"} for rank, step in enumerate((7, 13))]
    ended = lab.run(way=way, steps=17, plan=plan, max_failures=2)
    assert ended.code == 0, str(ended)
    assert lab.starts() == [0, 5, 10], str(ended)
    assert lab.failures_counted() == 2
    assert lab.steps()[-1] == 16


def test_a_report_that_fails_is_a_failure_and_the_run_resumes_before_it(lab: RayLab) -> None:
    """At a stop: nothing is called completed, the other worker does not wait for the commit, and the signal is gone."""
    plan = [{"at": "forward", "step": 7, "target": "rank 1"}]
    ended = lab.run(steps=12, plan=plan, max_failures=1, fail_stop_report=True)
    assert ended.code == 0, str(ended)
    assert lab.starts() == [0, 5], str(ended)
    assert lab.failures_counted() == 1
    assert "JIT checkpoint completed" not in ended.output


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
def test_a_controller_killed_in_its_snapshot_write_is_resumed(
    lab: RayLab, kills: int, request: pytest.FixtureRequest
) -> None:
    """Again and again, at another moment of the write: the next driver reads the list of checkpoints, and resumes."""
    if kills > 3:
        request.getfixturevalue("soak")
    chance = random.Random(kills)
    ends = []
    for _ in range(kills):
        ends.append(lab.run(steps=10_000, every=2, kill_in_snapshot=chance.randrange(12)))
        assert ends[-1].code not in (0, 143), str(ends[-1])
    assert len((lab.folder / "killed").read_text().splitlines()) == kills, str(ends[-1])
    done = lab.steps()[-1] + 1
    ended = lab.run(steps=done + 3, every=2)
    assert ended.code == 0, str(ended)
    starts = lab.starts()
    assert len(starts) == kills + 1 and starts == sorted(set(starts)), starts
    # At most the checkpoint whose registration was cut off is done again, and the steps behind it.
    lasts = [step for step, following in zip(lab.steps(), [*lab.steps()[1:], 0], strict=True) if following <= step]
    assert all(last + 1 - start <= 6 for last, start in zip(lasts, starts[1:], strict=False)), (starts, lasts)


def stop_job(driver: subprocess.Popen[bytes]) -> float:
    """Do what `ray job stop` does: SIGTERM to the job's processes, SIGKILL 3 s later. Returns when."""
    at = time.time()
    os.killpg(driver.pid, signal.SIGTERM)
    try:
        driver.wait(JOB_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(driver.pid, signal.SIGKILL)
    return at


def finish(lab: RayLab, steps: int) -> DriverEnd:
    ended = lab.run(steps=steps)
    assert ended.code == 0, str(ended)
    return ended


def test_a_job_that_is_stopped_saves_within_3_seconds(lab: RayLab) -> None:
    """On a busy machine it may take longer. Then the log says so (tests/ray_train/test_jobs.py accepts no less)."""
    driver = lab.start(steps=1000, step_s=0.1, grace=JOB_STOP_S, every=1000)
    lab.wait_for_step(5)
    stop_job(driver)
    ended = lab.wait(driver)
    assert ended.code in (143, -signal.SIGKILL), str(ended)
    done = lab.steps()[-1] + 1
    is_saved = "JIT checkpoint completed" in ended.output
    assert is_saved or TOO_LATE in ended.output, str(ended)
    finish(lab, done + 3)
    if is_saved:
        lab.assert_nothing_lost(done + 3, 2)
    else:
        assert lab.starts() == [0, 0]


def test_a_job_whose_save_takes_longer_than_its_stop_says_so(lab: RayLab) -> None:
    driver = lab.start(steps=100, step_s=0.1, grace=JOB_STOP_S, every=4, stop_save_s=30)
    lab.wait_for_step(9)
    stop_job(driver)
    ended = lab.wait(driver)
    assert ended.code != 0
    assert TOO_LATE in ended.output, str(ended)
    assert "JIT checkpoint completed" not in ended.output
    ended = finish(lab, 14)
    assert lab.starts()[1] in (4, 8, 12), "from its last periodic checkpoint"
