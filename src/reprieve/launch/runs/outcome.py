"""Decides how an attempt ended, and the launcher's exit code (exit_codes.py, docs/launch.md).

The decision follows from what the ranks have reported. Exit codes of other processes do not tell enough: torchrun exits
with 1 whether its ranks were preempted, refused to start or crashed, and a script may exit with 0 in the middle of its
training.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from reprieve import exit_codes
from reprieve.launch.rank_status import JobStatus
from reprieve.launch.runs.next_start import NextStart
from reprieve.run_state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """What was status of an attempt that is over."""

    code: int
    """The child's exit code, or minus the signal that killed it."""
    status: JobStatus
    stop: str | None = None
    """The reason of the stop request, if there was one."""
    paused: bool = False
    killed: bool = False
    """It still ran at the deadline and was killed."""
    hung_s: float | None = None
    """For how long no step was completed, if that was too long."""
    memory_kills: int = 0
    """How many processes of the launcher's cgroup the kernel killed meanwhile because memory ran out."""
    next_start: NextStart | None = None
    """What the next start resumes from, where the launcher knows the folder."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended, and what that means for the launcher."""

    state: RunState
    code: int
    message: str
    """What happened, and what to do."""
    can_retry: bool = False
    """Whether another attempt may succeed."""


def decide_outcome(result: AttemptResult) -> Outcome:
    """Decide how the attempt ended. A stop request comes before all other causes."""
    status = result.status
    if result.stop is not None:
        return _stopped(result)
    if result.hung_s is not None:
        message = f"no step in {result.hung_s:.0f} s: the job hung after step {status.step} and was ended"
        return Outcome(RunState.HUNG, exit_codes.as_shell(-signal.SIGKILL), message, can_retry=True)
    if status.refused is not None:
        return permanent_failure(status.refused)
    if result.code == exit_codes.PERMANENT_FAILURE:
        return permanent_failure("see its output above")
    if exit_codes.is_sigterm(result.code):
        # SIGTERM was sent to the command, and not to the launcher.
        return _stopped(replace(result, stop="SIGTERM"))
    if result.code == 0 and (status.finished or not status.ranks):
        step = f" after {status.step} steps" if status.ranks else ""
        return Outcome(RunState.FINISHED, exit_codes.FINISHED, f"finished{step}")
    if result.code == 0:
        return Outcome(
            RunState.FAILED,
            exit_codes.NOT_FINISHED,
            f"the script ended with 0 at step {status.step}, but its training is not finished. If it is meant to end "
            "there, call run.finish(). The next start resumes from its newest checkpoint",
        )
    return Outcome(RunState.FAILED, exit_codes.as_shell(result.code), _how_it_failed(result), can_retry=True)


def permanent_failure(reason: str) -> Outcome:
    message = f"permanent failure, restarting will not help: {reason}"
    return Outcome(RunState.FAILED, exit_codes.PERMANENT_FAILURE, message)


def _stopped(result: AttemptResult) -> Outcome:
    status, state = result.status, RunState.PAUSED if result.paused else RunState.PREEMPTED
    message = f"stopped by {result.stop}"
    if status.finished:
        # Training is complete, but the script may have more to do: evaluate, predict, save the model.
        message += f" after training was finished, at step {status.step}. The next start runs the rest of the script"
    elif status.was_saved_at_stop:
        next_start = "starts over, as the run has no name" if status.starts_over else "resumes from there"
        message += f": saved at step {status.step}. The next start {next_start}"
    elif status.step and status.saved_step == status.step:
        message += f" at step {status.step}, which was saved already. The next start resumes from there"
    elif status.step > (status.saved_step or 0):
        message += f": step {status.step} is NOT SAVED. {_next_start(result)}"
    elif status.ranks:
        message += f" before it trained a step: there was nothing to save. {_next_start(result)}"
    elif status.protected or (result.next_start is not None and result.next_start.checkpoint is not None):
        # The script may train without a session, which alone reports steps: in a loop around a `Checkpointer`, or in
        # its own loop beside an import of `Trainer`.
        message += f" before a protected training had begun: nothing was saved at the stop. {_next_start(result)}"
    else:
        message += (
            ": no protected training had begun, and nothing was saved. Loops with reprieve.Run and Hugging Face "
            "trainers are saved at a stop (docs/run.md)"
        )
    if result.killed:
        message += ". It did not end in time and was killed"
    return Outcome(state, exit_codes.PREEMPTED, message)


def _next_start(result: AttemptResult) -> str:
    if result.next_start is not None:
        return str(result.next_start)
    if result.status.saved_step:
        return f"The next start resumes from step {result.status.saved_step}"
    return "The next start resumes from the newest valid checkpoint, or begins at step 0 if there is none"


def _how_it_failed(result: AttemptResult) -> str:
    at = f" at step {result.status.step}" if result.status.ranks else ""
    if result.memory_kills:
        processes = "a process" if result.memory_kills == 1 else f"{result.memory_kills} processes"
        cause = f": out of memory, the kernel killed {processes}. Raise the memory limit, or use less"
    else:
        cause = ""
    if result.code < 0:
        name = _signal_name(-result.code)
        hint = " (out of memory?)" if -result.code == signal.SIGKILL and not cause else ""
        return f"killed by {name}{hint}" + (f", last reported{at}" if at else "") + cause
    return f"failed with exit code {result.code}{at}{cause}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
