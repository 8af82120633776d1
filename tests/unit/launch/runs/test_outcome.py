"""How an attempt ended, by the reports of its ranks and the exit of its child."""

from __future__ import annotations

import signal

import pytest

from reprieve.exit_codes import NOT_FINISHED, PERMANENT_FAILURE
from reprieve.exit_codes import PREEMPTED as EXIT_PREEMPTED
from reprieve.launch.rank_status import JobStatus
from reprieve.launch.runs.next_start import NextStart
from reprieve.launch.runs.outcome import AttemptResult, Outcome, decide_outcome
from reprieve.launcher_protocol import (
    Finished,
    Message,
    Protected,
    Refused,
    Report,
    Saved,
    Started,
    Starting,
    Step,
    Stopped,
    TorchImported,
)
from reprieve.run_state import RunState

FAILED, FINISHED, HUNG, PAUSED, PREEMPTED = (
    RunState.FAILED,
    RunState.FINISHED,
    RunState.HUNG,
    RunState.PAUSED,
    RunState.PREEMPTED,
)


def report(message: Message, rank: int = 0) -> Report:
    """As a Reporter sends it."""
    return Report(message=message, pid=100 + rank, at=50.0, rank=rank, world_size=2)


def status(*reports: Report) -> JobStatus:
    job = JobStatus()
    for one_report in reports:
        job.update(one_report)
    return job


STARTED = report(Started(checkpoints="/c"))
RESUMED = report(Started(checkpoints="/c", resumed=7))
STEP_9 = report(Step(step=9, done=0.5))
FINISHED_10 = report(Finished(step=10))
REFUSED = report(Refused(error="StateMismatch: another model"))
TORCH = report(TorchImported(), rank=-1)
"""What the import hook reports: about a process, not about a rank."""
PROTECTED = report(Protected(), rank=-1)
LOST_9 = "step 9 is NOT SAVED"


def saved(step: int) -> Report:
    return report(Saved(step=step, path="/c/x", bytes=1, began=49.0, took=1.0))


def stopped(step: int, *, was_saved: bool, starts_over: bool = False) -> Report:
    return report(Stopped(step=step, saved=was_saved, starts_over=starts_over, times={"agreed": 50.0}))


# No stop request


def test_finished() -> None:
    found = decide_outcome(AttemptResult(code=0, status=status(STARTED, STEP_9, FINISHED_10)))
    assert found == Outcome(FINISHED, 0, "finished after 10 steps")


def test_finished_before_it_was_started_again() -> None:
    already = report(Started(checkpoints="/c", resumed=10, finished=True))
    assert decide_outcome(AttemptResult(code=0, status=status(already))) == Outcome(
        FINISHED, 0, "finished after 10 steps"
    )


def test_a_command_that_told_nothing_is_believed() -> None:
    assert decide_outcome(AttemptResult(code=0, status=status())) == Outcome(FINISHED, 0, "finished")


def test_a_script_that_only_imports_torch_is_believed() -> None:
    assert decide_outcome(AttemptResult(code=0, status=status(TORCH))) == Outcome(FINISHED, 0, "finished")


def test_a_run_is_finished_when_its_ranks_are_whoever_else_imports_torch() -> None:
    found = decide_outcome(AttemptResult(code=0, status=status(TORCH, STARTED, STEP_9, TORCH, FINISHED_10)))
    assert found == Outcome(FINISHED, 0, "finished after 10 steps")


@pytest.mark.parametrize(
    "reports",
    [(STARTED, STEP_9), (STARTED, report(Started(), rank=1), STEP_9, FINISHED_10)],
    ids=["the only rank", "one rank of two"],
)
def test_a_script_that_ends_in_the_middle_has_not_finished(reports: tuple[Report, ...]) -> None:
    found = decide_outcome(AttemptResult(code=0, status=status(*reports)))
    assert (found.state, found.code, found.can_retry) == (FAILED, NOT_FINISHED, False)
    assert "not finished" in found.message
    assert "run.finish()" in found.message


@pytest.mark.parametrize("code", [0, 1, PERMANENT_FAILURE, -signal.SIGKILL])
def test_what_a_rank_refused_is_a_permanent_failure_whatever_the_exit_code(code: int) -> None:
    found = decide_outcome(AttemptResult(code=code, status=status(report(Starting(checkpoints="/c")), REFUSED)))
    assert found == Outcome(
        FAILED, PERMANENT_FAILURE, "permanent failure, restarting will not help: StateMismatch: another model"
    )


def test_42_is_a_permanent_failure_without_a_report() -> None:
    found = decide_outcome(AttemptResult(code=PERMANENT_FAILURE, status=status(STARTED)))
    assert (found.state, found.code, found.can_retry) == (FAILED, PERMANENT_FAILURE, False)


@pytest.mark.parametrize(
    ("code", "reports", "exit_code", "words"),
    [
        (3, (), 3, "failed with exit code 3"),
        (1, (STARTED, STEP_9), 1, "failed with exit code 1 at step 9"),
        (1, (STARTED, FINISHED_10), 1, "failed with exit code 1 at step 10"),
        (-signal.SIGSEGV, (STARTED, STEP_9), 139, "killed by SIGSEGV, last reported at step 9"),
        (-signal.SIGKILL, (STARTED, STEP_9), 137, "killed by SIGKILL (out of memory?), last reported at step 9"),
        (-signal.SIGKILL, (), 137, "killed by SIGKILL (out of memory?)"),
        (-41, (), 169, "killed by signal 41"),
    ],
)
def test_a_failure_has_the_codes_of_a_shell(code: int, reports: tuple[Report, ...], exit_code: int, words: str) -> None:
    assert decide_outcome(AttemptResult(code=code, status=status(*reports))) == Outcome(
        FAILED, exit_code, words, can_retry=True
    )


@pytest.mark.parametrize(
    ("code", "kills", "words"),
    [
        (1, 1, "failed with exit code 1 at step 9: out of memory, the kernel killed a process."),
        (1, 2, "failed with exit code 1 at step 9: out of memory, the kernel killed 2 processes."),
        (-signal.SIGKILL, 1, "killed by SIGKILL, last reported at step 9: out of memory, the kernel killed a process."),
    ],
)
def test_a_failure_names_memory_if_the_kernel_killed_for_it(code: int, kills: int, words: str) -> None:
    found = decide_outcome(AttemptResult(code=code, status=status(STARTED, STEP_9), memory_kills=kills))
    assert found.message == f"{words} Raise the memory limit, or use less"
    assert found.can_retry


@pytest.mark.parametrize("code", [-signal.SIGTERM, 143, 256 - signal.SIGTERM])
def test_a_command_that_sigterm_ended_was_stopped(code: int) -> None:
    """SIGTERM was sent to the command, not to the launcher. The codes of a parent, a shell and DeepSpeed."""
    found = decide_outcome(AttemptResult(code=code, status=status(STARTED, saved(5), STEP_9)))
    assert (found.state, found.code, found.can_retry) == (PREEMPTED, EXIT_PREEMPTED, False)
    assert found.message.startswith("stopped by SIGTERM: step 9 is NOT SAVED")
    assert decide_outcome(AttemptResult(code=code, status=status(STARTED, REFUSED))).code == PERMANENT_FAILURE
    assert decide_outcome(AttemptResult(code=code, status=status(STARTED), hung_s=600)).state == HUNG


def test_a_job_that_hung_is_tried_again() -> None:
    found = decide_outcome(
        AttemptResult(code=-signal.SIGKILL, status=status(STARTED, STEP_9), hung_s=600.4, killed=True)
    )
    assert found == Outcome(HUNG, 137, "no step in 600 s: the job hung after step 9 and was ended", can_retry=True)


# A stop request


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ((STARTED, STEP_9, FINISHED_10), "after training was finished, at step 10"),
        ((STARTED, STEP_9, stopped(9, was_saved=True)), ": saved at step 9. The next start resumes from there"),
        (
            (STARTED, STEP_9, stopped(9, was_saved=True, starts_over=True)),
            ": saved at step 9. The next start starts over, as the run has no name",
        ),
        ((STARTED, STEP_9, saved(9), stopped(9, was_saved=False)), " at step 9, which was saved already."),
        ((RESUMED, stopped(7, was_saved=False)), " at step 7, which was saved already."),
        ((RESUMED,), " at step 7, which was saved already."),
        ((STARTED, saved(5), STEP_9), f": {LOST_9}. The next start resumes from step 5"),
        ((STARTED, saved(5), STEP_9, stopped(9, was_saved=False)), f": {LOST_9}. The next start resumes from step 5"),
        ((RESUMED, STEP_9), f": {LOST_9}. The next start resumes from step 7"),
        (
            (STARTED, STEP_9),
            f": {LOST_9}. The next start resumes from the newest valid checkpoint, or begins at step 0",
        ),
        ((STARTED,), " before it trained a step: there was nothing to save. The next start resumes from the newest"),
        (
            (TORCH, PROTECTED),
            " before a protected training had begun: nothing was saved at the stop. The next start resumes from the",
        ),
        ((), ": no protected training had begun, and nothing was saved"),
        ((TORCH,), ": no protected training had begun, and nothing was saved"),
    ],
)
@pytest.mark.parametrize("paused", [False, True])
def test_a_stop_is_a_stop_and_says_what_is_saved(reports: tuple[Report, ...], words: str, paused: bool) -> None:
    for code in (0, 1, 143, PERMANENT_FAILURE, -signal.SIGTERM):
        found = decide_outcome(AttemptResult(code=code, status=status(*reports), stop="SIGTERM", paused=paused))
        assert (found.state, found.code, found.can_retry) == (PAUSED if paused else PREEMPTED, EXIT_PREEMPTED, False)
        assert words in found.message
        assert found.message.startswith("stopped by SIGTERM")
        assert "killed" not in found.message


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ((), "before a protected training had begun: nothing was saved at the stop"),
        ((TORCH,), "before a protected training had begun: nothing was saved at the stop"),
        ((PROTECTED,), "before a protected training had begun: nothing was saved at the stop"),
        ((PROTECTED, STARTED), "before it trained a step: there was nothing to save"),
    ],
)
def test_a_stop_before_the_first_step_names_the_checkpoint_that_is_there(
    reports: tuple[Report, ...], words: str
) -> None:
    """A script may have trained 1,000 steps in a loop of its own, which reports none of them."""
    found = decide_outcome(
        AttemptResult(code=1, status=status(*reports), stop="SIGTERM", next_start=NextStart("out", "checkpoint-30", 30))
    )
    assert found.message == (f"stopped by SIGTERM {words}. The next start resumes from checkpoint-30 (step 30) in out")


def test_a_stop_before_the_first_step_says_that_there_is_no_checkpoint() -> None:
    found = decide_outcome(AttemptResult(code=1, status=status(PROTECTED), stop="SIGTERM", next_start=NextStart("out")))
    assert found.message.endswith("There is no checkpoint in out: the next start begins at step 0")


def test_a_stop_that_took_too_long_says_so() -> None:
    found = decide_outcome(
        AttemptResult(code=-signal.SIGKILL, status=status(STARTED, saved(5), STEP_9), stop="SIGHUP", killed=True)
    )
    assert (found.state, found.code) == (PREEMPTED, EXIT_PREEMPTED)
    assert found.message.startswith("stopped by SIGHUP: step 9 is NOT SAVED")
    assert found.message.endswith("It did not end in time and was killed")


def test_a_stop_comes_before_all_other_causes() -> None:
    found = decide_outcome(AttemptResult(code=1, status=status(STARTED, REFUSED), stop="SIGTERM", hung_s=600))
    assert (found.state, found.code) == (PREEMPTED, EXIT_PREEMPTED)
