"""`reprieve drill`: a preemption that is rehearsed.

    start in a scratch folder → a few steps → SIGTERM → how long until it is saved, until it is gone → start again → is
    the state the same? → does it train?

The scratch folder lies beside the job's checkpoints, on the same disk, with a copy of the newest of them; the
checkpoints themselves are not touched. Nobody is killed at the deadline: how long the job would have needed is what we
are here to find out.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError
from reprieve.launch.attempt import Attempt, Signals
from reprieve.launch.command import Command
from reprieve.launch.import_hook import finder
from reprieve.launch.output_relay import OutputLog
from reprieve.launch.process import become_subreaper
from reprieve.launch.rank_status import JobStatus
from reprieve.launch.runs.outcome import AttemptResult
from reprieve.launcher_protocol import DRILL, LAUNCHER_SOCKET, Listener
from reprieve.settings import Settings
from reprieve.storage.uri import for_run, local_path

USUAL = timedelta(seconds=30)
"""Kubernetes' default, where nothing is known."""
_THIN = 0.25
"""A margin below this part of the grace period is thin: disks are not always equally fast."""


_ITS_END, _TIMED_OUT = "the drill", "the drill's time-out"
"""Why the drill itself ends the job."""


class DrillFailed(ReprieveError):
    """The rehearsal itself could not be held."""


@dataclass(slots=True)
class Report:
    """What came of it. Seconds."""

    grace_s: float
    grace_from: str
    survives: bool = False
    problems: list[str] = field(default_factory=list)
    """Why it does not."""
    advice: list[str] = field(default_factory=list)
    needed_s: float = 0.0
    """From the signal until nothing of the job was left."""
    agreement_s: float = 0.0
    """Until all ranks stood at one step; the rest of that step is in it."""
    save_s: float = 0.0
    """Until it was durable."""
    exit_s: float = 0.0
    """Until everything was gone."""
    restart_s: float = 0.0
    """From the next start to its first step."""
    step: int = 0
    bytes: int = 0
    ranks: int = 0
    equal: bool | None = None
    """The state after the restart is the state at the stop, bit for bit, on every rank; None: not compared."""
    compared: list[str] = field(default_factory=list)
    """The parts of the state that were compared."""
    differences: dict[str, list[int]] = field(default_factory=dict)
    """The parts of the state that are not equal, and on which ranks."""

    @property
    def margin_s(self) -> float:
        return self.grace_s - self.needed_s

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "margin_s": self.margin_s}


@dataclass
class Drill:
    """One rehearsal."""

    command: Command
    settings: Settings
    env: Mapping[str, str]
    steps: int
    timeout: timedelta
    """How long a start may take until it has trained so many steps, and a stop until it is over."""
    say: Callable[[str], None]
    copying: Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]]
    """Shows how much of so many bytes is copied."""

    def run(self, report: Report) -> Report:
        become_subreaper()
        with Signals() as self._signals:
            original = self.settings.checkpoints or self._ask_where()
            with _scratch(local_path(original)) as scratch:
                env = {**self._environment(scratch), **self._copy_newest(local_path(original), scratch)}
                self.say(f"starting the job, to preempt it after {self.steps} steps")
                stopped = self._preempt(env, report)
                if not report.problems:
                    self.say("starting it again")
                    self._start_again(env, report, stopped)
        _judge(report)
        return report

    def _ask_where(self) -> str:
        """The script knows where its checkpoints are: start it, and it says so."""
        self.say("starting the job, to see where its checkpoints are")
        with tempfile.TemporaryDirectory(prefix="reprieve-drill-") as scratch:
            env = self._environment(Path(scratch))
            attempt, ended, _ = self._until(env, lambda seen: seen.checkpoints is not None, then=signal.SIGKILL)
        if attempt.seen.checkpoints is None:
            raise _not_started(attempt.seen, ended)
        return attempt.seen.checkpoints

    def _preempt(self, env: Mapping[str, str], report: Report) -> JobStatus:
        def far_enough(seen: JobStatus) -> bool:
            return bool(seen.ranks) and seen.step >= (seen.resumed or 0) + self.steps

        attempt, ended, ended_at = self._until(env, far_enough)
        seen = attempt.seen
        if seen.refused is not None or not seen.ranks:
            raise _not_started(seen, ended)
        if attempt.stop is None:
            raise DrillFailed(
                f"the job ended by itself (exit code {ended.code}) at step {seen.step}, before it had trained "
                f"{self.steps} steps: give it more to do, or say --steps 1"
            )
        report.ranks, report.step = len(seen.ranks), seen.step
        _measure(report, attempt, ended_at)
        if ended.killed:
            report.problems.append(
                f"it was still running {self.timeout.total_seconds():g} s after the signal, and was killed"
            )
        elif not seen.was_saved_at_stop:
            report.problems.append("it was told to stop, and saved nothing: see what it said above")
        return seen

    def _start_again(self, env: Mapping[str, str], report: Report, before: JobStatus) -> None:
        launched = time.monotonic()
        attempt, ended, _ = self._until(env, lambda seen: seen.step > (seen.resumed or 0), then=signal.SIGKILL)
        seen = attempt.seen
        if seen.first_step_at is not None:
            spent_on_us = max(rank.fingerprint_s for rank in seen.ranks.values())
            report.restart_s = seen.first_step_at - launched - spent_on_us
        if seen.refused is not None:
            report.problems.append(f"it does not start again: {seen.refused}")
        elif seen.first_step_at is None and not seen.finished:
            why = (
                f"exit code {ended.code}" if attempt.stop is None else f"no step in {self.timeout.total_seconds():g} s"
            )
            report.problems.append(f"it does not train after the restart: {why}; see its output above")
        elif seen.resumed != before.step:
            resumed = "from the start" if seen.resumed is None else f"at step {seen.resumed}"
            report.problems.append(f"it was stopped at step {before.step} and resumed {resumed}")
        else:
            _compare(report, before, seen)

    def _until(
        self, env: Mapping[str, str], reached: Callable[[JobStatus], bool], then: int = signal.SIGTERM
    ) -> tuple[Attempt, AttemptResult, float]:
        """Start it; when that is reached, end it: by a preemption, or at once."""
        begun = time.monotonic()

        def on_change(attempt: Attempt) -> None:
            if attempt.stop is not None:
                return
            if reached(attempt.seen):
                attempt.request_stop(_ITS_END, at_once=then == signal.SIGKILL)
            elif time.monotonic() - begun > self.timeout.total_seconds():
                attempt.request_stop(_TIMED_OUT, at_once=True)

        listener = Listener()
        try:
            told = {**env, LAUNCHER_SOCKET: str(listener.path)}
            attempt = Attempt(
                self.command,
                told,
                self._signals,
                listener,
                OutputLog(None),
                self.timeout,
                None,
                on_change,
                output=(2, 2),  # stdout is for the report alone
            )
            ended = attempt.run()
            if ended.stop is not None and ended.stop not in (_ITS_END, _TIMED_OUT):
                raise DrillFailed(f"it was interrupted by {ended.stop}")
            return attempt, ended, time.monotonic()
        finally:
            listener.close()

    def _environment(self, scratch: Path) -> dict[str, str]:
        env = {**self.env, **self.settings.environment(), DRILL: str(scratch)}
        limit = math.ceil(self.timeout.total_seconds())
        env |= {"REPRIEVE_GRACE": f"{limit}s", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(limit), "PYTHONUNBUFFERED": "1"}
        env["CHECKPOINT_RESUME"] = "true"
        finder.add_to(env)
        return env

    def _copy_newest(self, original: Path, scratch: Path) -> dict[str, str]:
        """What the job would go on from; with what has to be in the environment for that."""
        from reprieve.checkpoint.folder.catalog import list_checkpoints

        found = (
            [one for one in list_checkpoints(original) if one.problem is None and not one.is_quarantined]
            if original.is_dir()
            else []
        )
        if not found:
            return {}
        newest = found[0]
        target = for_run(original, str(scratch)) / newest.path.name
        if shutil.disk_usage(scratch).free < 2.2 * newest.bytes:
            raise DrillFailed(
                f"no room beside {original} for two more of {newest.path.name} ({newest.bytes:,} bytes each)"
            )
        with self.copying(newest.bytes) as copied:
            _copy(newest.path, target, copied)
        return {"REPRIEVE_RUN": newest.manifest.run} if newest.manifest is not None else {}


_UNPROTECTED = (
    "nothing in this job is protected: it uses neither reprieve.Run nor a trainer that Reprieve knows, so a preemption "
    "loses what it has done. docs/run.md shows the six lines that change that"
)


def _not_started(seen: JobStatus, ended: AttemptResult) -> DrillFailed:
    """Why the job has not come to its training."""
    if seen.refused is not None:
        return DrillFailed(f"the job does not start: {seen.refused}")
    if ended.stop == _TIMED_OUT:
        return DrillFailed("the job has not begun to train in time: give it more with --timeout")
    if ended.code != 0:
        return DrillFailed(f"the job ended with exit code {ended.code} before it trained: see its output above")
    return DrillFailed(_UNPROTECTED)


def _measure(report: Report, attempt: Attempt, ended_at: float) -> None:
    """From the moment at which we sent the signal. The slowest rank counts."""
    assert attempt.stop is not None
    sent = attempt.stop.at
    told = attempt.seen.stopped
    spent_on_us = max((one.fingerprint_s for one in told), default=0.0)
    report.needed_s = ended_at - sent - spent_on_us
    times = [one.times for one in told]
    if times:
        agreed = max(one["agreed"] for one in times) - sent
        durable = max(one.get("durable", one["agreed"]) for one in times) - sent
        report.agreement_s, report.save_s = agreed, durable - agreed
        report.exit_s = report.needed_s - durable
    report.bytes = max((save.bytes for save in attempt.seen.saves), default=0)


def _compare(report: Report, before: JobStatus, after: JobStatus) -> None:
    """Is the state after the restart the one at the stop?"""
    for number, rank in sorted(before.ranks.items()):
        saved = rank.stopped.fingerprints if rank.stopped is not None else {}
        restored = after.ranks[number].fingerprints if number in after.ranks else {}
        if not saved or not restored:
            report.problems.append(f"rank {number} did not report its state: whether it is restored is not known")
            return
        report.compared += [part for part in saved if part not in report.compared]
        for part, fingerprint in saved.items():
            if restored.get(part) != fingerprint:
                report.differences.setdefault(part, []).append(number)
    report.equal = not report.differences
    if report.differences:
        report.problems.append(
            f"the state after the restart is not the one that was saved: {_named(report.differences)}"
        )


def _named(differences: Mapping[str, list[int]]) -> str:
    """The parts, and their ranks once for all parts that differ on the same ones."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for part, ranks in differences.items():
        by_ranks.setdefault(tuple(ranks), []).append(part)
    return "; ".join(
        f"{', '.join(parts)} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        for ranks, parts in by_ranks.items()
    )


def _judge(report: Report) -> None:
    """Does it survive, and what would help?"""
    if report.margin_s < 0:
        report.problems.append(
            f"it takes {report.needed_s:.1f} s, and has {report.grace_s:g} s: it would be killed, and would lose steps"
        )
    report.survives = not report.problems
    report.advice += [advice for part, advice in _WHAT_HELPS.items() if part in report.differences]
    if report.margin_s < _THIN * report.grace_s:
        _advise_on_time(report)


_WHAT_HELPS = {
    "model": "change no weights after they are loaded, and make weights that no checkpoint holds (the base of an "
    "adapter) with a fixed seed",
    "data order": "shuffle and sample the data with a fixed seed",
}


def _advise_on_time(report: Report) -> None:
    parts = {"agreement": report.agreement_s, "save": report.save_s, "exit": report.exit_s}
    longest = max(parts, key=lambda name: parts[name])
    if longest == "save" and report.save_s > 0:
        speed = f" ({report.bytes / report.save_s / 1e9:.2f} GB/s)" if report.bytes else ""
        report.advice.append(
            f"most of the time goes into the save{speed}: a faster disk for the checkpoints, or a smaller state"
        )
    elif longest == "agreement":
        report.advice.append("most of the time passes until the step ends: shorter steps (fewer accumulated batches)")
    else:
        report.advice.append("most of the time passes after the save: what does the script do in `finally` and atexit?")
    wanted = max(30, math.ceil(report.needed_s * 1.5 / 10) * 10)
    if wanted > report.grace_s:
        report.advice.append(
            f"a grace period of {wanted} s would do "
            f"(terminationGracePeriodSeconds: {wanted}, or --grace-period {wanted}s)"
        )


@contextlib.contextmanager
def _scratch(original: Path) -> Iterator[Path]:
    """On the disk that the checkpoints are on. Gone afterwards."""
    beside = original.parent
    while not beside.exists():
        beside = beside.parent
    try:
        folder = Path(tempfile.mkdtemp(prefix=".reprieve-drill-", dir=beside))
    except OSError as error:
        raise DrillFailed(f"a scratch folder beside {original} cannot be made: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy(source: Path, target: Path, copied: Callable[[int], None]) -> None:
    for path in sorted(source.rglob("*")):
        to = target / path.relative_to(source)
        if path.is_dir():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as read, to.open("wb") as write:
            while moved := os.sendfile(write.fileno(), read.fileno(), None, 2**24):
                copied(moved)
