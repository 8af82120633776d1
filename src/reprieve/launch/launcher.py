"""`reprieve run`: attempts at a command, one after another, until it finished, was stopped, or is given up.

    settings → record → attempt → outcome → (restart | last words and exit code)

No torch here, and nothing that is slow to import: it is there before the command is, and stays out of its way.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from reprieve import exit_codes, redaction
from reprieve.launch.attempt import STOPS, Attempt, Signals
from reprieve.launch.command import Command
from reprieve.launch.import_hook import finder
from reprieve.launch.messages import exit_message, print_message
from reprieve.launch.output_relay import OutputLog
from reprieve.launch.page_cache_warmup import PageCacheWarmup
from reprieve.launch.process import become_subreaper
from reprieve.launch.runs import goodput, outcome
from reprieve.launch.runs.next_start import NextStart, find_next_start
from reprieve.launch.runs.outcome import AttemptResult, Outcome
from reprieve.launch.runs.restart_policy import RestartPolicy, Retry
from reprieve.launch.runs.run_record import RunFolder, RunRecord, Runs, default_name
from reprieve.launcher_protocol import INTERRUPTIONS, LAUNCHER_SOCKET, Listener, Pause
from reprieve.preemption.deadline import NO_LIMIT_S, Grace, resolve_grace_period
from reprieve.run_state import RunState
from reprieve.settings import SETTINGS, Settings
from reprieve.storage.uri import shown

log = logging.getLogger("reprieve")

_WRITE_EVERY_S = 2.0
_TELL_AFTER_S = 30.0
"""So long after it has imported torch a script that trains with us has said so."""


@dataclass
class Launcher:
    """Of one run."""

    command: Command
    settings: Settings
    name: str | None = None
    """Of a run that is resumed. Its checkpoints know it by `settings.name`, if its user gave it one."""
    runs: Runs = field(default_factory=Runs)
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    grace_period: Grace = field(init=False)
    _record: RunRecord = field(init=False)
    _folder: RunFolder = field(init=False)
    _listener: Listener = field(init=False)
    _written: tuple[str, bool] = ("", False)
    _written_at: float = 0.0
    _torch_since: float | None = None
    _announced: str | None = None
    """The checkpoint that the attempt has resumed from, as it was printed."""
    _told_unprotected: bool = False
    _told_problem: bool = False

    def run(self) -> int:
        """The exit code."""
        _open_standard_streams()
        become_subreaper()
        self.grace_period = resolve_grace_period(self.settings.grace_period, self.env)
        name = (
            self.name
            or self.settings.name
            or default_name(self.command.script, self.command.words, str(Path.cwd()), self.settings.checkpoints)
        )
        with Signals() as signals, self.runs.hold(name) as self._folder:
            self._listener = Listener()
            try:
                return self._attempts(signals)
            finally:
                self._listener.close()

    def _attempts(self, signals: Signals) -> int:
        self._record = self._open_record()
        restarts = RestartPolicy(self.settings.max_restarts)
        output = OutputLog(self._folder.path / "log")
        while True:
            ended = self._attempt(signals, output, first=restarts.used == 0)
            if not ended.again:
                break
            again = restarts.after_failure(self._record.attempts[-1].to_step)
            if not isinstance(again, Retry):
                reason = f"{ended.words}. {again.reason}" if again.reason else ended.words
                ended = Outcome(ended.state, ended.code, reason)
                break
            self._record.restarts += 1
            print_message(
                f"{ended.words}. Starting again in {again.wait_s:.1f} s "
                f"({restarts.used} of {self.settings.max_restarts})"
            )
            self._change(RunState.WAITING, ended.words)
            if (stopped := _told_while_waiting(signals, self._listener, again.wait_s)) is not None:
                ended = stopped
                break
        self._change(ended.state, ended.words, ended.code)
        output.close()
        exit_message(ended.words)
        return ended.code

    def _attempt(self, signals: Signals, output: OutputLog, *, first: bool) -> Outcome:
        self._announced = None
        entry = goodput.AttemptRecord(time.time())
        self._record.attempts.append(entry)
        self._change(RunState.STARTING)
        attempt = Attempt(
            self.command,
            self._environment(first=first),
            signals,
            self._listener,
            output,
            self.grace_period.period if self.grace_period.certain else None,
            self.settings.hang_timeout,
            self._on_change,
        )
        with PageCacheWarmup(
            self._record.checkpoints if not (first and self.settings.fresh) else None
        ) as self._warming:
            try:
                ended = attempt.run()
            except OSError as error:
                code = (
                    exit_codes.COMMAND_NOT_FOUND if isinstance(error, FileNotFoundError) else exit_codes.CANNOT_EXECUTE
                )
                entry.end(time.time(), RunState.FAILED)
                return Outcome(RunState.FAILED, code, f"{self.command.argv[0]} cannot be started: {error.strerror}")
        if attempt.seen.torch and not attempt.seen.protected and ended.code == 0:
            self._tell_unprotected()
        self._note_progress(attempt)
        result = outcome.outcome(replace(ended, next_start=self._next_start(ended, first=first)))
        offset = time.time() - time.monotonic()
        if result.code == 0 or attempt.seen.was_saved_at_stop:
            entry.kept_until = (attempt.seen.last_step_at or time.monotonic()) + offset
        entry.end(time.time(), result.state)
        return result

    def _environment(self, *, first: bool) -> dict[str, str]:
        env = {**self.env, **self.settings.environment(), LAUNCHER_SOCKET: str(self._listener.path)}
        if self.grace_period.certain and self.grace_period.period is not None:
            env[SETTINGS["grace_period"].env] = SETTINGS["grace_period"].format(self.grace_period.period)
        # torchrun's first 30 s; its second, after the first rank has ended, no rank lets begin (docs/run.md).
        known = self.grace_period.period.total_seconds() if self.grace_period.period is not None else NO_LIMIT_S
        env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(known)))
        env.setdefault("PYTHONUNBUFFERED", "1")  # our pipe is not the terminal that it would flush lines to
        if self.settings.fresh and not first:
            env[SETTINGS["fresh"].env] = "true"  # to start over is for the first attempt alone
        count, training = goodput.losses(
            self._record.attempts, (RunState.FAILED, RunState.HUNG, RunState.LOST), time.time()
        )
        env[INTERRUPTIONS] = f"{count}/{training:.0f}"
        finder.add_to(env)
        return env

    # The record

    def _open_record(self) -> RunRecord:
        kept, left_out = redaction.storable(self.env)
        fresh = RunRecord(
            self._folder.name,
            redaction.masked(self.command.words),
            str(Path.cwd()),
            self.settings.options(),
            kept,
            left_out,
            checkpoints=self.settings.checkpoints,
        )
        earlier = self._folder.read()
        if earlier is not None and not self.settings.fresh:
            fresh.attempts, fresh.restarts = earlier.attempts, earlier.restarts
            fresh.step, fresh.done = earlier.step, earlier.done
            fresh.checkpoints = fresh.checkpoints or earlier.checkpoints
            fresh.checkpoint_step, fresh.checkpoint_at = earlier.checkpoint_step, earlier.checkpoint_at
            if fresh.attempts and fresh.attempts[-1].ended is None:
                fresh.attempts[-1].end(earlier.updated, RunState.LOST)
        fresh.mine()
        fresh.socket = str(self._listener.path)
        return fresh

    def _on_change(self, attempt: Attempt) -> None:
        seen = attempt.seen
        if seen.torch and not seen.protected and not seen.undecided:
            self._torch_since = self._torch_since or time.monotonic()
            if time.monotonic() - self._torch_since > _TELL_AFTER_S:
                self._tell_unprotected()
        if seen.ranks:
            self._warming.stop()
        self._note_progress(attempt)
        if attempt.stop is not None:
            state, reason = RunState.STOPPING, attempt.stop.reason
        elif seen.ranks or attempt.child.code is not None:
            state, reason = RunState.RUNNING, ""
        else:
            state, reason = RunState.STARTING, ""
        known = (state, self._record.done is not None)
        if known != self._written or time.monotonic() - self._written_at > _WRITE_EVERY_S:
            self._written = known
            self._change(state, reason)

    def _note_progress(self, attempt: Attempt) -> None:
        seen, entry, mine = attempt.seen, self._record.attempts[-1], self._record
        offset = time.time() - time.monotonic()
        if not seen.ranks:
            return
        if seen.checkpoint is not None and seen.checkpoint != self._announced:
            self._announced = seen.checkpoint
            path = Path(seen.checkpoint)
            print_message(f"resuming from {path.name} (step {seen.resumed}) in {shown(path.parent)}")
        mine.step, mine.done = seen.step, seen.done
        mine.checkpoints = seen.checkpoints or mine.checkpoints
        entry.from_step, entry.to_step = seen.resumed or 0, seen.step
        if entry.training is None and seen.first_step_at is not None:
            entry.training = seen.first_step_at + offset
        if seen.saved_step is not None and seen.saved_step != mine.checkpoint_step:
            mine.checkpoint_step, mine.checkpoint_at = seen.saved_step, time.time()
        if seen.saves:
            entry.kept_until = seen.saves[-1].began + offset
        mine.eta_s = seen.eta_s

    def _change(self, state: RunState, reason: str = "", code: int | None = None) -> None:
        self._record.state, self._record.reason, self._record.exit_code = state, reason, code
        self._written_at = time.monotonic()
        self._folder.write(self._record)
        if self._folder.problem is not None and not self._told_problem:
            self._told_problem = True
            print_message(
                f"the run record cannot be written: {self._folder.problem}. `reprieve status` will not know of this run"
            )

    def _next_start(self, ended: AttemptResult, *, first: bool) -> NextStart | None:
        if self._record.checkpoints is None or (ended.code == 0 and ended.stop is None):
            return None
        if self.settings.fresh and first and not ended.seen.ranks:
            return None  # the old checkpoints may not be moved away yet
        return find_next_start(self._record.checkpoints)

    def _tell_unprotected(self) -> None:
        if not self._told_unprotected:
            self._told_unprotected = True
            print_message(
                "this script is not protected: it uses neither reprieve.Run nor a trainer that Reprieve knows, and a "
                "stop loses what it has done. Six lines change that: docs/run.md"
            )


def _told_while_waiting(signals: Signals, listener: Listener, wait_s: float) -> Outcome | None:
    """Nothing runs, between two attempts. To be stopped is easy."""
    until = time.monotonic() + wait_s
    while (left := until - time.monotonic()) > 0:
        select.select([signals.reader, listener.socket], [], [], left)
        for number in signals.read():
            if number in STOPS or number == signal.SIGINT:
                why = signal.Signals(number).name
                return Outcome(RunState.PREEMPTED, exit_codes.PREEMPTED, f"stopped by {why} between two attempts")
        if any(isinstance(told.message, Pause) for told in listener.read()):
            return Outcome(RunState.PAUSED, exit_codes.PREEMPTED, "stopped by reprieve pause between two attempts")
    return None


def _open_standard_streams() -> None:
    """One that was closed would become the next file that we open, and the command would print into it."""
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != fd:
            os.dup2(opened, fd)
            os.close(opened)
