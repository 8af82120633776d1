"""`reprieve drill`: rehearses a preemption.

    start in a scratch folder → train a few steps → SIGTERM → measure the save and the exit → start again → compare the
    state → train

The scratch folder is beside the job's checkpoints, on the same disk, and has a copy of the newest checkpoint. The
checkpoints themselves are not touched. The drill does not kill the job at the deadline: it measures how long the job
takes.
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
from reprieve.launch.attempt import Attempt, SignalReceiver
from reprieve.launch.command import Command
from reprieve.launch.import_hook import finder
from reprieve.launch.output_relay import OutputLog
from reprieve.launch.process import become_subreaper
from reprieve.launch.rank_status import JobStatus
from reprieve.launch.runs.outcome import AttemptResult
from reprieve.launcher_protocol import DRILL, LAUNCHER_SOCKET, Listener
from reprieve.settings import SETTINGS, Settings
from reprieve.storage.uri import local_path, run_folder

DEFAULT_GRACE_PERIOD = timedelta(seconds=30)
"""Kubernetes' default, where nothing is known."""
_THIN_MARGIN = 0.25
"""A margin below this fraction of the grace period is thin: the speed of disks varies."""

_DRILL, _TIMED_OUT = "the drill", "the drill's time-out"
"""The reasons of the drill's own stop requests."""


class DrillFailed(ReprieveError):
    """The drill could not be carried out."""


@dataclass(slots=True)
class DrillReport:
    """The result of a drill. Times are in seconds."""

    grace_s: float
    grace_from: str
    survives: bool = False
    problems: list[str] = field(default_factory=list)
    """Why the job does not survive."""
    advice: list[str] = field(default_factory=list)
    needed_s: float = 0.0
    """From the signal until all processes of the job had ended."""
    agreement_s: float = 0.0
    """Until all ranks were at the same step, the rest of that step included."""
    save_s: float = 0.0
    """From then until the checkpoint was durable."""
    exit_s: float = 0.0
    """From then until all processes had ended."""
    restart_s: float = 0.0
    """From the next start to its first completed step."""
    step: int = 0
    bytes: int = 0
    ranks: int = 0
    equal: bool | None = None
    """Whether the state after the restart is the state at the stop, bit for bit, on every rank; None: not compared."""
    compared: list[str] = field(default_factory=list)
    """The parts of the state that were compared."""
    differences: dict[str, list[int]] = field(default_factory=dict)
    """The parts of the state that differ, with the ranks on which they do."""

    @property
    def margin_s(self) -> float:
        return self.grace_s - self.needed_s

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "margin_s": self.margin_s}


@dataclass
class Drill:
    """One drill."""

    command: Command
    settings: Settings
    env: Mapping[str, str]
    steps: int
    timeout: timedelta
    """How long a start may take until `steps` are trained, and how long a stop may take."""
    print_message: Callable[[str], None]
    show_copy: Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]]
    """Shows the progress of a copy, given its size in bytes."""

    def run(self, report: DrillReport) -> DrillReport:
        become_subreaper()
        with SignalReceiver() as self._signals:
            original = self.settings.checkpoints or self._find_checkpoints()
            with _scratch(local_path(original)) as scratch:
                env = {**self._environment(scratch), **self._copy_newest(local_path(original), scratch)}
                self.print_message(f"starting the job; it is preempted after {self.steps} steps")
                stopped = self._preempt(env, report)
                if not report.problems:
                    self.print_message("starting it again")
                    self._start_again(env, report, stopped)
        _judge(report)
        return report

    def _find_checkpoints(self) -> str:
        """Start the script to learn the folder of its checkpoints from its first report."""
        self.print_message("starting the job to find the folder of its checkpoints")
        with tempfile.TemporaryDirectory(prefix="reprieve-drill-") as scratch:
            env = self._environment(Path(scratch))
            attempt, result, _ = self._run_until(
                env, lambda status: status.checkpoints is not None, then=signal.SIGKILL
            )
        if attempt.status.checkpoints is None:
            raise _not_started(attempt.status, result)
        return attempt.status.checkpoints

    def _preempt(self, env: Mapping[str, str], report: DrillReport) -> JobStatus:
        def has_trained(status: JobStatus) -> bool:
            return bool(status.ranks) and status.step >= (status.resumed or 0) + self.steps

        attempt, result, ended_at = self._run_until(env, has_trained)
        status = attempt.status
        if status.refused is not None or not status.ranks:
            raise _not_started(status, result)
        if attempt.stop is None:
            raise DrillFailed(
                f"the job ended by itself (exit code {result.code}) at step {status.step}, before it had trained "
                f"{self.steps} steps: let it train longer, or use --steps 1"
            )
        report.ranks, report.step = len(status.ranks), status.step
        _measure(report, attempt, ended_at)
        if result.killed:
            report.problems.append(f"it still ran {self.timeout.total_seconds():g} s after the signal and was killed")
        elif not status.was_saved_at_stop:
            report.problems.append("it received SIGTERM and saved nothing: see its output above")
        return status

    def _start_again(self, env: Mapping[str, str], report: DrillReport, before: JobStatus) -> None:
        launched = time.monotonic()
        attempt, result, _ = self._run_until(
            env, lambda status: status.step > (status.resumed or 0), then=signal.SIGKILL
        )
        status = attempt.status
        if status.first_step_at is not None:
            fingerprint_s = max(rank.fingerprint_s for rank in status.ranks.values())
            report.restart_s = status.first_step_at - launched - fingerprint_s
        if status.refused is not None:
            report.problems.append(f"it does not start again: {status.refused}")
        elif status.first_step_at is None and not status.finished:
            reason = (
                f"exit code {result.code}" if attempt.stop is None else f"no step in {self.timeout.total_seconds():g} s"
            )
            report.problems.append(f"it does not train after the restart: {reason}; see its output above")
        elif status.resumed != before.step:
            resumed = "from the start" if status.resumed is None else f"at step {status.resumed}"
            report.problems.append(f"it was stopped at step {before.step} and resumed {resumed}")
        else:
            _compare(report, before, status)

    def _run_until(
        self, env: Mapping[str, str], reached: Callable[[JobStatus], bool], then: int = signal.SIGTERM
    ) -> tuple[Attempt, AttemptResult, float]:
        """Start the job and end it when `reached` holds, by a preemption or at once.

        Returns the attempt, its result and when it had ended.
        """
        started_at = time.monotonic()

        def on_change(attempt: Attempt) -> None:
            if attempt.stop is not None:
                return
            if reached(attempt.status):
                attempt.request_stop(_DRILL, at_once=then == signal.SIGKILL)
            elif time.monotonic() - started_at > self.timeout.total_seconds():
                attempt.request_stop(_TIMED_OUT, at_once=True)

        listener = Listener()
        try:
            attempt_env = {**env, LAUNCHER_SOCKET: str(listener.path)}
            attempt = Attempt(
                self.command,
                attempt_env,
                self._signals,
                listener,
                OutputLog(None),
                self.timeout,
                None,
                on_change,
                output=(2, 2),  # stdout holds only the report
            )
            result = attempt.run()
            if result.stop is not None and result.stop not in (_DRILL, _TIMED_OUT):
                raise DrillFailed(f"the drill was interrupted by {result.stop}")
            return attempt, result, time.monotonic()
        finally:
            listener.close()

    def _environment(self, scratch: Path) -> dict[str, str]:
        env = {**self.env, **self.settings.environment(), DRILL: str(scratch)}
        limit = math.ceil(self.timeout.total_seconds())
        env |= {SETTINGS["grace_period"].env: f"{limit}s", SETTINGS["fresh"].env: "true"}
        env |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(limit), "PYTHONUNBUFFERED": "1"}
        finder.add_to(env)
        return env

    def _copy_newest(self, original: Path, scratch: Path) -> dict[str, str]:
        """Copy the checkpoint that the job would resume from. Returns the variables that the copy needs."""
        from reprieve.checkpoint.folder.catalog import list_checkpoints

        found = (
            [
                checkpoint
                for checkpoint in list_checkpoints(original)
                if checkpoint.problem is None and not checkpoint.is_quarantined
            ]
            if original.is_dir()
            else []
        )
        if not found:
            return {}
        newest = found[0]
        target = run_folder(original, str(scratch)) / newest.path.name
        if shutil.disk_usage(scratch).free < 2.2 * newest.bytes:
            raise DrillFailed(
                f"no space beside {original} for two more copies of {newest.path.name} ({newest.bytes:,} bytes each)"
            )
        with self.show_copy(newest.bytes) as copied:
            _copy(newest.path, target, copied)
        return {SETTINGS["name"].env: newest.manifest.run} if newest.manifest is not None else {}


_UNPROTECTED = (
    "nothing in this job is protected: it uses neither reprieve.Run nor a supported trainer, so a preemption loses its "
    "work. docs/run.md shows the six lines that protect it"
)


def _not_started(status: JobStatus, result: AttemptResult) -> DrillFailed:
    """Return why the job did not begin to train."""
    if status.refused is not None:
        return DrillFailed(f"the job does not start: {status.refused}")
    if result.stop == _TIMED_OUT:
        return DrillFailed("the job has not begun to train in time: allow more with --timeout")
    if result.code != 0:
        return DrillFailed(f"the job ended with exit code {result.code} before it trained: see its output above")
    return DrillFailed(_UNPROTECTED)


def _measure(report: DrillReport, attempt: Attempt, ended_at: float) -> None:
    """Measure the stages of the stop from when the signal was sent. The slowest rank counts."""
    assert attempt.stop is not None
    sent = attempt.stop.at
    reports = attempt.status.stopped
    fingerprint_s = max((stopped.fingerprint_s for stopped in reports), default=0.0)
    report.needed_s = ended_at - sent - fingerprint_s
    times = [stopped.times for stopped in reports]
    if times:
        agreed = max(stages["agreed"] for stages in times) - sent
        durable = max(stages.get("durable", stages["agreed"]) for stages in times) - sent
        report.agreement_s, report.save_s = agreed, durable - agreed
        report.exit_s = report.needed_s - durable
    report.bytes = max((save.bytes for save in attempt.status.saves), default=0)


def _compare(report: DrillReport, before: JobStatus, after: JobStatus) -> None:
    """Compare the state after the restart with the state at the stop."""
    for number, rank in sorted(before.ranks.items()):
        saved = rank.stopped.fingerprints if rank.stopped is not None else {}
        restored = after.ranks[number].fingerprints if number in after.ranks else {}
        if not saved or not restored:
            report.problems.append(f"rank {number} did not report its state: it is unknown whether it was restored")
            return
        report.compared += [part for part in saved if part not in report.compared]
        for part, fingerprint in saved.items():
            if restored.get(part) != fingerprint:
                report.differences.setdefault(part, []).append(number)
    report.equal = not report.differences
    if report.differences:
        report.problems.append(
            f"the state after the restart is not the one that was saved: {_describe(report.differences)}"
        )


def _describe(differences: Mapping[str, list[int]]) -> str:
    """Group the parts by the ranks on which they differ."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for part, ranks in differences.items():
        by_ranks.setdefault(tuple(ranks), []).append(part)
    return "; ".join(
        f"{', '.join(parts)} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        for ranks, parts in by_ranks.items()
    )


def _judge(report: DrillReport) -> None:
    """Decide whether the job survives, and what would help."""
    if report.margin_s < 0:
        report.problems.append(
            f"it takes {report.needed_s:.1f} s but has only {report.grace_s:g} s: it would be killed and lose steps"
        )
    report.survives = not report.problems
    report.advice += [advice for part, advice in _ADVICE.items() if part in report.differences]
    if report.margin_s < _THIN_MARGIN * report.grace_s:
        _advise_on_time(report)


_ADVICE = {
    "model": "do not change weights after they are loaded, and initialize weights that no checkpoint holds (the base "
    "of an adapter) with a fixed seed",
    "data order": "shuffle and sample the data with a fixed seed",
}


def _advise_on_time(report: DrillReport) -> None:
    parts = {"agreement": report.agreement_s, "save": report.save_s, "exit": report.exit_s}
    longest = max(parts, key=lambda name: parts[name])
    if longest == "save" and report.save_s > 0:
        speed = f" ({report.bytes / report.save_s / 1e9:.2f} GB/s)" if report.bytes else ""
        report.advice.append(
            f"most of the time is the save{speed}: use a faster disk for the checkpoints, or a smaller state"
        )
    elif longest == "agreement":
        report.advice.append("most of the time is the rest of the step: use shorter steps (fewer accumulated batches)")
    else:
        report.advice.append("most of the time is after the save: check what the script does in `finally` and atexit")
    needed_grace_s = max(30, math.ceil(report.needed_s * 1.5 / 10) * 10)
    if needed_grace_s > report.grace_s:
        report.advice.append(
            f"a grace period of {needed_grace_s} s is enough "
            f"(terminationGracePeriodSeconds: {needed_grace_s}, or --grace-period {needed_grace_s}s)"
        )


@contextlib.contextmanager
def _scratch(original: Path) -> Iterator[Path]:
    """A temporary folder on the disk of the checkpoints."""
    parent = original.parent
    while not parent.exists():
        parent = parent.parent
    try:
        folder = Path(tempfile.mkdtemp(prefix=".reprieve-drill-", dir=parent))
    except OSError as error:
        raise DrillFailed(f"cannot make a scratch folder beside {original}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy(source: Path, target: Path, copied: Callable[[int], None]) -> None:
    for path in sorted(source.rglob("*")):
        destination = target / path.relative_to(source)
        if path.is_dir():
            continue
        destination.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as read, destination.open("wb") as write:
            while moved := os.sendfile(write.fileno(), read.fileno(), None, 2**24):
                copied(moved)
