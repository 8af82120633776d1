"""What the ranks tell the launcher: the socket it hears them on, and what is known of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reprieve.progress import report

PAUSE = "pause"
"""Not from a rank: `reprieve pause` asks the launcher to stop the run."""


class Listener:
    """The socket, in a folder that only this user can enter."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="reprieve-"))
        self.path = self._folder / "launcher"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.socket.bind(str(self.path))

    def read(self) -> list[dict[str, Any]]:
        """All that was told since; what is not a report is left out."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                data = self.socket.recv(2**16)
            except BlockingIOError:
                return found
            with contextlib.suppress(ValueError, RecursionError):
                told = json.loads(data)
                if isinstance(told, dict) and isinstance(told.get("event"), str):
                    found.append(told)

    def close(self) -> None:
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def tell(path: str, event: str, **facts: Any) -> bool:
    """From another process to a launcher. False: it is not there."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as sender:
        sender.settimeout(2.0)
        try:
            sender.sendto(json.dumps({"event": event, "pid": os.getpid(), **facts}).encode(), path)
        except OSError:
            return False
    return True


def _has(told: dict[str, Any], *numbers: str) -> bool:
    return all(isinstance(told.get(name), int | float) for name in numbers)


@dataclass(slots=True)
class RankStatus:
    """What one rank has told."""

    pid: int
    step: int = 0
    done: float | None = None
    """How much of the training is done, from 0 to 1."""
    eta_s: float | None = None
    first_step_at: float | None = None
    heard_at: float = 0.0
    """When it last said something. Training says where it is, at steps and in evaluations."""
    saved_step: int | None = None
    stopping: str | None = None
    ended_at: float | None = None
    """When its last step was done: it was stopped, or has finished."""
    stopped: dict[str, Any] | None = None
    finished: bool = False
    refused: str | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    """In a drill: of each part of the state that the rank resumed from."""
    fingerprint_s: float = 0.0
    """How long these took."""


@dataclass(slots=True)
class JobStatus:
    """What all ranks of one attempt have told."""

    ranks: dict[int, RankStatus] = field(default_factory=dict)
    checkpoints: str | None = None
    resumed: int | None = None
    """The step that the attempt went on from; None: from the start, or not known yet."""
    checkpoint: str | None = None
    """The checkpoint of that step: its path."""
    torch: bool = False
    """Somebody has imported torch."""
    undecided: bool = False
    """The script imports a library that may protect its training, later."""
    protected: bool = False
    """The script has loaded what protects its training; or a rank has started."""
    terminated: bool = False
    """SIGTERM has ended a rank before the rank could handle it, or torchrun."""
    crashed: set[int] = field(default_factory=set)
    """The processes of ranks of which one has failed: torchrun ends the others with SIGTERM, and that is no stop."""
    saves: list[dict[str, Any]] = field(default_factory=list)

    def take(self, told: dict[str, Any]) -> None:
        event = told["event"]
        if event == report.TORCH:
            self.torch = True
            self.undecided = self.undecided or bool(told.get("undecided"))
        elif event == report.PROTECTED:
            self.protected = True
        elif event == report.TERMINATED:
            self.terminated = True
        elif event == report.CRASHED:
            self.crashed.update(told.get("pids", ()))
        else:
            self._take_from_rank(told)

    def _take_from_rank(self, told: dict[str, Any]) -> None:
        event, rank = told["event"], told.get("rank")
        if not isinstance(rank, int) or not _has(told, "pid", "at"):
            return
        self.protected = True
        if event in (report.STEP, report.SAVED) and not _has(told, "step"):
            return
        if event == report.STARTED:
            self.ranks[rank] = RankStatus(int(told["pid"]), step=int(told.get("resumed") or 0))
            self.checkpoints = told.get("checkpoints", self.checkpoints)
            self.resumed = told.get("resumed")
            self.checkpoint = told.get("checkpoint")
            self.ranks[rank].finished = bool(told.get("finished"))
        if event == report.STARTING:
            self.checkpoints = told.get("checkpoints", self.checkpoints)
        if (one := self.ranks.get(rank)) is None:
            one = self.ranks[rank] = RankStatus(int(told["pid"]))
        one.heard_at = float(told["at"])
        if event == report.RESTORED and isinstance(told.get("fingerprints"), dict) and _has(told, "fingerprint_s"):
            one.fingerprints |= told["fingerprints"]
            one.fingerprint_s += float(told["fingerprint_s"])
        elif event == report.STEP:
            if int(told["step"]) > one.step:
                one.first_step_at = one.first_step_at or one.heard_at
            one.step, one.done = int(told["step"]), told.get("done", one.done)
            one.eta_s = told.get("eta_s", one.eta_s)
        elif event == report.SAVED:
            one.saved_step = int(told["step"])
            if rank == min(self.ranks):
                self.saves.append(told)
        elif event == report.STOPPING and one.pid not in self.crashed:
            one.stopping, one.ended_at = str(told.get("reason", "")), one.heard_at
        elif event == report.STOPPED:
            one.stopped = told
            one.step = int(told.get("step", one.step))
            if told.get("saved"):
                one.saved_step = one.step
        elif event == report.FINISHED:
            one.finished, one.step, one.done = True, int(told.get("step", one.step)), 1.0
            one.ended_at = one.heard_at
        elif event == report.REFUSED:
            one.refused = str(told.get("error", ""))

    @property
    def pids(self) -> set[int]:
        return {one.pid for one in self.ranks.values()}

    @property
    def step(self) -> int:
        """The furthest of any rank: they are one step apart at most."""
        return max((one.step for one in self.ranks.values()), default=0)

    @property
    def saved_step(self) -> int | None:
        """Of the newest checkpoint that is known."""
        known = [one.saved_step for one in self.ranks.values() if one.saved_step is not None]
        return max(known, default=self.resumed)

    @property
    def done(self) -> float | None:
        return next((one.done for one in self.ranks.values() if one.done is not None), None)

    @property
    def eta_s(self) -> float | None:
        """How long the rest takes, as the ranks say."""
        return next((one.eta_s for one in self.ranks.values() if one.eta_s is not None), None)

    @property
    def finished(self) -> bool:
        return bool(self.ranks) and all(one.finished for one in self.ranks.values())

    @property
    def stopping(self) -> str | None:
        """Why a rank stops, if one does."""
        if self.terminated:
            return "SIGTERM"
        return next((one.stopping for one in self.ranks.values() if one.stopping is not None), None)

    @property
    def stopped(self) -> list[dict[str, Any]]:
        return [one.stopped for one in self.ranks.values() if one.stopped is not None]

    @property
    def refused(self) -> str | None:
        """Why it will never work without a person, if a rank said so."""
        return next((one.refused for one in self.ranks.values() if one.refused is not None), None)

    @property
    def first_step_at(self) -> float | None:
        return min((one.first_step_at for one in self.ranks.values() if one.first_step_at is not None), default=None)

    @property
    def ended_at(self) -> float | None:
        """When the last step was done."""
        return max((one.ended_at for one in self.ranks.values() if one.ended_at is not None), default=None)

    def heard_at(self) -> float | None:
        """When a rank last said something; None before the first has started."""
        return max((one.heard_at for one in self.ranks.values()), default=None)
