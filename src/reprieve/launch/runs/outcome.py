"""How an attempt ended, in one of the codes that users and clusters rely on.

    0     training finished
    143   stopped: a preemption or a pause
    42    will never work without a person
    else  the child's own

What counts is what the ranks have said of themselves. torchrun exits with 1 whether its ranks were preempted, refused
to start or crashed, and a script may exit with 0 in the middle of its training.
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
    """What was seen of an attempt that is over."""

    code: int
    """Of the child: its exit code, or minus the signal that killed it."""
    seen: JobStatus
    stop: str | None = None
    """Why it was to stop, if it was."""
    paused: bool = False
    killed: bool = False
    """It was still running at the deadline, or after it was found to hang."""
    hung_s: float | None = None
    """For how long no step was completed, where that was too long."""
    next_start: NextStart | None = None
    """What is on storage, where the launcher knows the folder."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What that means."""

    state: RunState
    code: int
    words: str
    """For a person: what happened, and what to do."""
    again: bool = False
    """It failed in a way that another attempt may not."""


def outcome(ended: AttemptResult) -> Outcome:
    seen = ended.seen
    if ended.stop is not None:
        return _stopped(ended)
    if ended.hung_s is not None:
        words = f"no step in {ended.hung_s:.0f} s: it hung after step {seen.step}, and was ended"
        return Outcome(RunState.HUNG, exit_codes.as_shell(-signal.SIGKILL), words, again=True)
    if seen.refused is not None:
        return Outcome(RunState.FAILED, exit_codes.PERMANENT_FAILURE, f"it needs a person: {seen.refused}")
    if ended.code == exit_codes.PERMANENT_FAILURE:
        return Outcome(RunState.FAILED, exit_codes.PERMANENT_FAILURE, "it needs a person: see what it said above")
    if exit_codes.is_sigterm(ended.code):
        # Sent to the command, and not to the launcher.
        return _stopped(replace(ended, stop="SIGTERM"))
    if ended.code == 0 and (seen.finished or not seen.ranks):
        step = f" after {seen.step} steps" if seen.ranks else ""
        return Outcome(RunState.FINISHED, exit_codes.FINISHED, f"finished{step}")
    if ended.code == 0:
        return Outcome(
            RunState.FAILED,
            exit_codes.NOT_FINISHED,
            f"the script ended with 0 at step {seen.step}, and its training is not finished. If it is meant to end "
            "there, call run.finish(); started again, it goes on from its newest checkpoint",
        )
    return Outcome(RunState.FAILED, exit_codes.as_shell(ended.code), _how_it_failed(ended), again=True)


def _stopped(ended: AttemptResult) -> Outcome:
    seen, state = ended.seen, RunState.PAUSED if ended.paused else RunState.PREEMPTED
    words = f"stopped by {ended.stop}"
    if seen.finished:
        # There is nothing more to train, but the script may have more to do: evaluate, predict, save the model.
        words += f" after training was finished, at step {seen.step}. The next start runs the rest of the script"
    elif seen.was_saved_at_stop:
        words += f": saved at step {seen.step}. The next start resumes from there"
    elif seen.step and seen.saved_step == seen.step:
        words += f" at step {seen.step}, which was saved already. The next start resumes from there"
    elif seen.step > (seen.saved_step or 0):
        words += f": step {seen.step} is NOT SAVED. {_next_start(ended)}"
    elif seen.protected or (ended.next_start is not None and ended.next_start.checkpoint is not None):
        words += f" before it trained a step: there was nothing to save. {_next_start(ended)}"
    else:
        words += (
            ": no protected training had begun, and nothing was saved. Loops with reprieve.Run and Hugging Face "
            "trainers are saved at a stop (docs/run.md)"
        )
    if ended.killed:
        words += ". It did not end in time, and was killed"
    return Outcome(state, exit_codes.PREEMPTED, words)


def _next_start(ended: AttemptResult) -> str:
    if ended.next_start is not None:
        return str(ended.next_start)
    if ended.seen.saved_step:
        return f"The next start resumes from step {ended.seen.saved_step}"
    return "The next start resumes from the newest valid checkpoint, or begins at step 0 if there is none"


def _how_it_failed(ended: AttemptResult) -> str:
    at = f" at step {ended.seen.step}" if ended.seen.ranks else ""
    if ended.code < 0:
        name = _signal_name(-ended.code)
        hint = " (out of memory?)" if -ended.code == signal.SIGKILL else ""
        return f"killed by {name}{hint}" + (f", when last heard of{at}" if at else "")
    return f"failed with exit code {ended.code}{at}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
