"""`reprieve run`: starts a command, and restarts it until it finishes, is stopped, or fails too often.

    settings → run record → attempt → outcome → (restart | exit message and exit code)

This module imports neither torch nor anything slow: the launcher starts before the command and must not delay it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from reprieve import exit_codes
from reprieve.checkpoint.folder.attempts import AttemptRecord, with_recorded_ends
from reprieve.checkpoint.folder.lease import read_record
from reprieve.checkpoint.folder.paths import LEASE_FOLDER
from reprieve.errors import ConfigError
from reprieve.host import in_pod
from reprieve.launch import restricted_container
from reprieve.launch.attempt import STOP_SIGNALS, Attempt, SignalReceiver
from reprieve.launch.command import Command
from reprieve.launch.import_hook import finder
from reprieve.launch.messages import print_exit_message, print_message
from reprieve.launch.node_share import NodeShare, find_node_share
from reprieve.launch.output_relay import OutputLog
from reprieve.launch.page_cache_warmup import PageCacheWarmup
from reprieve.launch.process import become_subreaper
from reprieve.launch.rendezvous import find_static_rendezvous
from reprieve.launch.runs.attempt_log import AttemptLog
from reprieve.launch.runs.next_start import NextStart, find_next_start
from reprieve.launch.runs.outcome import AttemptResult, Outcome, decide_outcome, permanent_failure
from reprieve.launch.runs.restart_policy import RestartPolicy, Retry, find_endless_restarts
from reprieve.launch.runs.run_record import RunFolder, RunRecord, Runs, default_name
from reprieve.launcher_protocol import LAUNCHER_SOCKET, START_OVER, Listener, Pause
from reprieve.preemption.deadline import NO_LIMIT_S, Grace, resolve_grace_period, take_over_wait
from reprieve.progress import redaction
from reprieve.run_state import RunState
from reprieve.settings import SETTINGS, Settings
from reprieve.storage.uri import display_path, local_path

log = logging.getLogger("reprieve")

_WRITE_INTERVAL_S = 2.0
_PREDECESSOR_POLL_S = 0.5
_LAST_RECORD_S = 3.0
"""How long after its ranks have left the folder an earlier launcher may record how its attempt ended."""
_UNPROTECTED_AFTER_S = 30.0
"""How long after its import of torch a script without protection is reported as unprotected."""


@dataclass
class Launcher:
    """Launches one run."""

    command: Command
    settings: Settings
    name: str | None = None
    """The name of a run that is resumed. `settings.name`, which checkpoints carry, is the one that the user gave."""
    runs: Runs = field(default_factory=Runs)
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    grace_period: Grace = field(init=False)
    _record: RunRecord = field(init=False)
    _folder: RunFolder = field(init=False)
    _listener: Listener = field(init=False)
    _share: NodeShare = field(init=False)
    _attempt_log: AttemptLog | None = None
    """The record of attempts in the checkpoint folder, once the folder is known."""
    _knows_earlier_ends: bool = False
    """Whether the attempts of earlier launchers were read after the last of them had left the folder."""
    _start_over: str = ""
    """The id of the request to start over, if there is one (`Settings.start_over`)."""
    _written: tuple[str, bool] = ("", False)
    _written_at: float = 0.0
    _torch_since: float | None = None
    _announced_checkpoint: str | None = None
    """The checkpoint of the last "resuming from" message of this attempt."""
    _warned_unprotected: bool = False
    _warned_record: bool = False

    def run(self) -> int:
        """Run the command and return the exit code."""
        _open_standard_streams()
        become_subreaper()
        self.grace_period = resolve_grace_period(self.settings.grace_period, self.env)
        self._share = find_node_share(self.command.words, self.env)
        self.settings.start_over(self.env)  # refused in a pod without a run name
        # A pod that comes back is the same run. On a terminal, each --fresh is a request of its own.
        is_repeated = in_pod(self.env) or self.settings.sources["fresh"] == SETTINGS["fresh"].env
        self._start_over = (self.settings.name if is_repeated else None) or uuid.uuid4().hex
        name = (
            self.name
            or self.settings.name
            or default_name(self.command.script, self.command.words, str(Path.cwd()), self.settings.checkpoints)
        )
        with SignalReceiver() as signals, self.runs.hold(name) as self._folder:
            self._listener = Listener()
            try:
                return self._attempts(signals)
            finally:
                self._listener.close()

    def _attempts(self, signals: SignalReceiver) -> int:
        self._record = self._open_record()
        restarts = RestartPolicy(self.settings.max_restarts)
        output_log = OutputLog(None if in_pod(self.env) else self._folder.path / "log")  # the kubelet keeps one
        if (refusal := self._use_attempt_log()) is not None:
            return self._exit(permanent_failure(refusal))
        while True:
            outcome = self._wait_for_predecessor(signals) or self._attempt(signals, output_log)
            if not outcome.can_retry:
                break
            decision = restarts.after_failure(self._record.attempts[-1].to_step)
            if not isinstance(decision, Retry):
                message = f"{outcome.message}. {decision.reason}" if decision.reason else outcome.message
                outcome = Outcome(outcome.state, outcome.code, message)
                break
            self._record.restarts += 1
            print_message(
                f"{outcome.message}. Restarting in {decision.wait_s:.1f} s "
                f"({restarts.used} of {self.settings.max_restarts})"
            )
            self._update_record(RunState.WAITING, outcome.message)
            if (stopped := _wait_before_start(signals, self._listener, decision.wait_s)) is not None:
                outcome = stopped
                break
        output_log.close()
        return self._exit(outcome)

    def _exit(self, outcome: Outcome) -> int:
        self._update_record(outcome.state, outcome.message, outcome.code)
        if self._attempt_log is not None:
            self._attempt_log.close()
        print_exit_message(outcome.message, outcome.state, self._record.step)
        return outcome.code

    def _wait_for_predecessor(self, signals: SignalReceiver) -> Outcome | None:
        """Wait until torchrun cannot join the rendezvous of an earlier start of this node (rendezvous.py). Return the
        outcome of a stop request that arrives meanwhile."""
        rendezvous = find_static_rendezvous(self.command.words, self.env)
        if rendezvous is None or not rendezvous.has_predecessor():
            return None
        wait = take_over_wait(self.settings.take_over, self.grace_period)
        print_message(
            f"an earlier start of node {rendezvous.node} still takes part in the rendezvous at {rendezvous.host}:"
            f"{rendezvous.port}: waiting up to {wait} for it to end"
        )
        give_up_at = time.monotonic() + wait.total_seconds()
        while rendezvous.has_predecessor():
            if time.monotonic() >= give_up_at:
                print_message(f"the earlier start of node {rendezvous.node} did not end within {wait}: starting anyway")
                return None
            if (stopped := _wait_before_start(signals, self._listener, _PREDECESSOR_POLL_S)) is not None:
                return stopped
        return None

    def _attempt(self, signals: SignalReceiver, output_log: OutputLog) -> Outcome:
        self._announced_checkpoint = None
        starts_over = self._starts_over(self._record.checkpoints)
        entry = AttemptRecord(time.time(), run=self.settings.name or "", launcher=str(self._listener.path))
        self._record.attempts.append(entry)
        self._update_record(RunState.STARTING)
        attempt = Attempt(
            self.command,
            self._environment(),
            signals,
            self._listener,
            output_log,
            self.grace_period.period if self.grace_period.certain else None,
            self.settings.hang_timeout,
            self._on_change,
        )
        checkpoints = None if starts_over else self._record.checkpoints
        with PageCacheWarmup(checkpoints, self._share) as self._warmup:
            try:
                result = attempt.run()
            except OSError as error:
                code = (
                    exit_codes.COMMAND_NOT_FOUND if isinstance(error, FileNotFoundError) else exit_codes.CANNOT_EXECUTE
                )
                entry.end(time.time(), RunState.FAILED)
                return Outcome(RunState.FAILED, code, f"{self.command.argv[0]} cannot be started: {error.strerror}")
        if attempt.status.torch and not attempt.status.protected and result.code == 0:
            self._warn_unprotected()
        self._record_progress(attempt)
        outcome = decide_outcome(replace(result, next_start=self._next_start(result, starts_over=starts_over)))
        offset = time.time() - time.monotonic()
        if outcome.code == 0 or attempt.status.was_saved_at_stop:
            entry.kept_until = (attempt.status.last_step_at or time.monotonic()) + offset
        entry.end(time.time(), outcome.state)
        return outcome

    def _environment(self) -> dict[str, str]:
        env = {**self.env, **self.settings.environment(), LAUNCHER_SOCKET: str(self._listener.path)}
        if self.grace_period.certain and self.grace_period.period is not None:
            env[SETTINGS["grace_period"].env] = SETTINGS["grace_period"].format(self.grace_period.period)
        # torchrun kills its ranks this long after a signal. Its other timeout, after the first rank has exited, does
        # not matter: no rank exits before all have saved (docs/run.md).
        limit_s = self.grace_period.period.total_seconds() if self.grace_period.period is not None else NO_LIMIT_S
        env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(limit_s)))
        env.setdefault(
            "PYTHONUNBUFFERED", "1"
        )  # the launcher's pipe is not a terminal, to which Python would flush lines
        if self.settings.fresh:
            env[START_OVER] = self._start_over
        finder.add_to(env)
        restricted_container.add_missing(env, self._listener.path.parent)
        return env

    # The record

    def _open_record(self) -> RunRecord:
        stored, left_out = redaction.storable(self.env)
        record = RunRecord(
            self._folder.name,
            redaction.masked(self.command.words),
            str(Path.cwd()),
            self.settings.options(),
            stored,
            left_out,
            checkpoints=self.settings.checkpoints,
        )
        earlier = self._folder.read()
        if earlier is not None and not self._starts_over(earlier.checkpoints):
            record.attempts, record.restarts = earlier.attempts, earlier.restarts
            record.step, record.done = earlier.step, earlier.done
            record.checkpoints = record.checkpoints or earlier.checkpoints
            record.checkpoint_step, record.checkpoint_at = earlier.checkpoint_step, earlier.checkpoint_at
            if record.attempts and record.attempts[-1].ended is None:
                record.attempts[-1].end(earlier.updated, RunState.LOST)
        record.set_launcher()
        record.socket = str(self._listener.path)
        return record

    def _on_change(self, attempt: Attempt) -> None:
        status = attempt.status
        if status.torch and not status.protected and not status.undecided:
            self._torch_since = self._torch_since or time.monotonic()
            if time.monotonic() - self._torch_since > _UNPROTECTED_AFTER_S:
                self._warn_unprotected()
        if status.ranks:
            self._warmup.stop()
        if self._attempt_log is None and status.checkpoints is not None:
            self._record.checkpoints = status.checkpoints
            status.refusal = self._use_attempt_log()
        self._record_progress(attempt)
        if attempt.stop is not None:
            state, reason = RunState.STOPPING, attempt.stop.reason
        elif status.ranks or attempt.child.code is not None:
            state, reason = RunState.RUNNING, ""
        else:
            state, reason = RunState.STARTING, ""
        written = (state, self._record.done is not None)
        if written != self._written or time.monotonic() - self._written_at > _WRITE_INTERVAL_S:
            self._written = written
            self._update_record(state, reason)

    def _record_progress(self, attempt: Attempt) -> None:
        status, entry, record = attempt.status, self._record.attempts[-1], self._record
        offset = time.time() - time.monotonic()
        if not status.ranks:
            return
        self._settle_earlier_attempts(attempt)
        if status.checkpoint is not None and status.checkpoint != self._announced_checkpoint:
            self._announced_checkpoint = status.checkpoint
            path = Path(status.checkpoint)
            print_message(f"resuming from {path.name} (step {status.resumed}) in {display_path(path.parent)}")
        record.step, record.done = status.step, status.done
        record.checkpoints = status.checkpoints or record.checkpoints
        entry.from_step, entry.to_step, entry.saved_step = status.resumed or 0, status.step, status.saved_step
        if entry.training is None and status.first_step_at is not None:
            entry.training = status.first_step_at + offset
        if status.saved_step is not None and status.saved_step != record.checkpoint_step:
            record.checkpoint_step, record.checkpoint_at = status.saved_step, time.time()
        if status.saves:
            entry.kept_until = status.saves[-1].began + offset
        record.eta_s = status.eta_s

    def _update_record(self, state: RunState, reason: str = "", code: int | None = None) -> None:
        self._record.state, self._record.reason, self._record.exit_code = state, reason, code
        self._written_at = time.monotonic()
        self._folder.write(self._record)
        if self._attempt_log is not None and self._record.attempts:
            self._attempt_log.update(self._record.attempts)
        if self._folder.problem is not None and not self._warned_record:
            self._warned_record = True
            print_message(
                f"the run record cannot be written: {self._folder.problem}. `reprieve status` will not show this run, "
                "and `reprieve logs` has no copy of its output"
            )

    def _use_attempt_log(self) -> str | None:
        """Continue the record of attempts in the checkpoint folder, once the folder is known. Returns why the run must
        not start, if a cluster would restart it without end."""
        if self._record.checkpoints is None or self.settings.drill is not None:
            return None
        try:
            root = local_path(self._record.checkpoints)
        except ConfigError:  # the ranks report it
            return None
        starts_over = self._starts_over(self._record.checkpoints)
        self._attempt_log = AttemptLog(root, self._share.node or 0, str(self._listener.path), starts_over=starts_over)
        self._merge_earlier_attempts(self._attempt_log)
        if self.settings.name is None or not in_pod(self.env):
            return None  # a person starts it again, after a change
        return find_endless_restarts(self._record.attempts, self.settings.name)

    def _merge_earlier_attempts(self, attempt_log: AttemptLog) -> list[AttemptRecord]:
        """Take over what the checkpoint folder knows of other launchers' attempts. Returns these, the oldest first."""
        earlier, own_path = attempt_log.earlier(), str(self._listener.path)
        known = {attempt.key for attempt in self._record.attempts}
        others = [attempt for attempt in self._record.attempts if attempt.launcher != own_path]
        others = with_recorded_ends(others, earlier) + [attempt for attempt in earlier if attempt.key not in known]
        others.sort(key=lambda attempt: attempt.launched)
        # The own ones stay the last also where clocks of machines differ.
        self._record.attempts = others + [each for each in self._record.attempts if each.launcher == own_path]
        return others

    def _settle_earlier_attempts(self, attempt: Attempt) -> None:
        """Once the ranks hold the folder, find out how the attempt before this launcher ended. Before that, its
        launcher may still be at work, and its end is not recorded yet."""
        started_at = attempt.status.started_at
        if self._knows_earlier_ends or self._attempt_log is None or started_at is None:
            return
        if attempt.child.code is None and time.monotonic() - started_at < _LAST_RECORD_S:
            return
        self._knows_earlier_ends = True
        others = self._merge_earlier_attempts(self._attempt_log)
        if others and others[-1].cause == RunState.LOST:
            print_message(
                f"the attempt before this one was killed without notice, after step {others[-1].to_step or 0}. What "
                "it trained since its last checkpoint is repeated"
            )

    def _starts_over(self, checkpoints: str | None) -> bool:
        """Return whether the next attempt moves the checkpoints away. `checkpoints`: the folder, if it is known."""
        if not self.settings.fresh or checkpoints is None:
            return self.settings.fresh
        with contextlib.suppress(OSError, ConfigError):
            lease = read_record(local_path(checkpoints) / LEASE_FOLDER)
            return lease is None or lease.started_over != self._start_over
        return True

    def _next_start(self, result: AttemptResult, *, starts_over: bool) -> NextStart | None:
        if self._record.checkpoints is None or (result.code == 0 and result.stop is None):
            return None
        if starts_over and not result.status.ranks:
            return None  # the old checkpoints may not have been moved away yet
        return find_next_start(self._record.checkpoints)

    def _warn_unprotected(self) -> None:
        if not self._warned_unprotected:
            self._warned_unprotected = True
            print_message(
                "this script is not protected: it uses neither reprieve.Run nor a supported trainer, and a stop loses "
                "its work. docs/run.md shows the six lines that protect it"
            )


def _wait_before_start(signals: SignalReceiver, listener: Listener, wait_s: float) -> Outcome | None:
    """Wait before an attempt. Return the outcome of a stop request that arrives meanwhile."""
    until = time.monotonic() + wait_s
    while (remaining_s := until - time.monotonic()) > 0:
        select.select([signals.reader, listener.socket], [], [], remaining_s)
        for number in signals.read():
            if number in STOP_SIGNALS or number == signal.SIGINT:
                reason = signal.Signals(number).name
                return Outcome(RunState.PREEMPTED, exit_codes.PREEMPTED, f"stopped by {reason} before the next attempt")
        if any(isinstance(report.message, Pause) for report in listener.read()):
            return Outcome(RunState.PAUSED, exit_codes.PREEMPTED, "stopped by reprieve pause before the next attempt")
    return None


def _open_standard_streams() -> None:
    """Open closed standard streams: the next opened file would take their number and get the command's output."""
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != fd:
            os.dup2(opened, fd)
            os.close(opened)
