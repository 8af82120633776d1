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
from dataclasses import dataclass

from reprieve.launch.reports import Seen

FINISHED, PREEMPTED, PAUSED, FAILED, HUNG = "finished", "preempted", "paused", "failed", "hung"

STOPPED = 143
NEEDS_A_PERSON = 42
NOT_FINISHED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What was seen of an attempt that is over."""

    code: int
    """Of the child: its exit code, or minus the signal that killed it."""
    seen: Seen
    stop: str | None = None
    """Why it was to stop, if it was."""
    paused: bool = False
    killed: bool = False
    """It was still running at the deadline, or after it was found to hang."""
    hung_s: float | None = None
    """For how long no step was completed, where that was too long."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What that means."""

    state: str
    code: int
    words: str
    """For a person: what happened, and what to do."""
    again: bool = False
    """It failed in a way that another attempt may not."""


def outcome(ended: Ended) -> Outcome:
    seen = ended.seen
    if ended.stop is not None:
        return _stopped(ended)
    if ended.hung_s is not None:
        words = f"no step in {ended.hung_s:.0f} s: it hung after step {seen.step}, and was ended"
        return Outcome(HUNG, 128 + signal.SIGKILL, words, again=True)
    if seen.refused is not None:
        return Outcome(FAILED, NEEDS_A_PERSON, f"it needs a person: {seen.refused}")
    if ended.code == NEEDS_A_PERSON:
        return Outcome(FAILED, NEEDS_A_PERSON, "it needs a person: see what it said above")
    if ended.code == 0 and (seen.finished or not seen.ranks):
        step = f" after {seen.step} steps" if seen.ranks else ""
        return Outcome(FINISHED, 0, f"finished{step}")
    if ended.code == 0:
        return Outcome(
            FAILED,
            NOT_FINISHED,
            f"the script ended with 0 at step {seen.step}, and its training is not finished. If it is meant to end "
            "there, call run.finish(); started again, it goes on from its newest checkpoint",
        )
    return Outcome(FAILED, ended.code if ended.code > 0 else 128 - ended.code, _how_it_failed(ended), again=True)


def _stopped(ended: Ended) -> Outcome:
    seen, state = ended.seen, PAUSED if ended.paused else PREEMPTED
    if seen.finished:
        # The signal came in the last moment: there is nothing to go on with. A second start says so and ends with 0.
        words = f"stopped by {ended.stop} after training was finished, at step {seen.step}"
    elif any(one.get("saved") for one in seen.stopped):
        words = f"stopped by {ended.stop}: saved at step {seen.step}. The next start goes on from there"
    elif seen.stopped and seen.saved_step == seen.step:
        words = (
            f"stopped by {ended.stop} at step {seen.step}, which was saved already. The next start goes on from there"
        )
    elif seen.saved_step is not None:
        words = f"stopped by {ended.stop}: NOT SAVED. The next start goes on from step {seen.saved_step}"
    elif seen.ranks:
        words = (
            f"stopped by {ended.stop}: nothing new is saved. The next start goes on from the newest valid checkpoint"
        )
    else:
        words = f"stopped by {ended.stop}. Nothing in it was protected: the next start does what the script does"
    if ended.killed:
        words += ". It did not end in time, and was killed"
    return Outcome(state, STOPPED, words)


def _how_it_failed(ended: Ended) -> str:
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
