"""What the launcher knows about the ranks of one attempt, from their reports (launcher_protocol.py).

`JobStatus.update` takes one report after another. The launcher, the drill and the outcome of an attempt read the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reprieve.launcher_protocol import (
    Crashed,
    Finished,
    Protected,
    Refused,
    Report,
    Restored,
    Saved,
    Started,
    Starting,
    Step,
    Stopped,
    Stopping,
    Terminated,
    TorchImported,
)


@dataclass(slots=True)
class RankStatus:
    """What the launcher knows about one rank."""

    pid: int
    step: int = 0
    done: float | None = None
    """The completed fraction of the training, from 0 to 1."""
    eta_s: float | None = None
    first_step_at: float | None = None
    last_report_at: float = 0.0
    """A training rank reports at steps and during evaluations."""
    saved_step: int | None = None
    stopping: str | None = None
    """The reason of the stop request that the rank received."""
    last_step_at: float | None = None
    """When it stopped training: at a stop request, or because it finished."""
    stopped: Stopped | None = None
    finished: bool = False
    refused: str | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    """In a drill: of each part of the state that the rank resumed from."""
    fingerprint_s: float = 0.0
    """How long they took to compute."""


@dataclass(slots=True)
class JobStatus:
    """What the launcher knows about all ranks of one attempt."""

    ranks: dict[int, RankStatus] = field(default_factory=dict)
    checkpoints: str | None = None
    resumed: int | None = None
    """The step that the attempt resumed from; None: it started from scratch, or has not reported yet."""
    checkpoint: str | None = None
    """The path of the checkpoint that it resumed from."""
    started_at: float | None = None
    """When the first rank reported that it is about to train: this attempt holds the folder."""
    torch: bool = False
    """A process imported torch."""
    undecided: bool = False
    """The script imports a library that may protect its training later."""
    protected: bool = False
    """The script loaded what protects its training, or a rank has started."""
    terminated: bool = False
    """SIGTERM ended torchrun, or a rank before the rank could handle it."""
    crashed: set[int] = field(default_factory=set)
    """The processes of torchruns with a failed rank: torchrun ends them with SIGTERM, and that is not a stop."""
    saves: list[Saved] = field(default_factory=list)
    refusal: str | None = None
    """Why the launcher refuses to let it train, found out after the start."""

    def update(self, report: Report) -> None:
        match report.message:
            case TorchImported(undecided=undecided):
                self.torch = True
                self.undecided = self.undecided or undecided
            case Protected():
                self.protected = True
            case Terminated():
                self.terminated = True
            case Crashed(pids=pids):
                self.crashed.update(pids)
            case _ if report.rank >= 0:
                self.protected = True
                self._update_rank(report)

    def _update_rank(self, report: Report) -> None:
        message = report.message
        if isinstance(message, Started):
            self.ranks[report.rank] = RankStatus(report.pid, step=message.resumed or 0, finished=message.finished)
            self.resumed, self.checkpoint = message.resumed, message.checkpoint
            self.started_at = self.started_at or report.at
        if isinstance(message, Started | Starting):
            self.checkpoints = message.checkpoints or self.checkpoints
        rank = self.ranks.setdefault(report.rank, RankStatus(report.pid))
        rank.last_report_at = report.at
        match message:
            case Restored():
                rank.fingerprints |= message.fingerprints
                rank.fingerprint_s += message.fingerprint_s
            case Step():
                if message.step > rank.step:
                    rank.first_step_at = rank.first_step_at or report.at
                rank.step = message.step
                rank.done = message.done if message.done is not None else rank.done
                rank.eta_s = message.eta_s if message.eta_s is not None else rank.eta_s
            case Saved():
                rank.saved_step = message.step
                if report.rank == min(self.ranks):
                    self.saves.append(message)
            case Stopping() if rank.pid not in self.crashed:
                rank.stopping, rank.last_step_at = message.reason, report.at
            case Stopped():
                rank.stopped, rank.step = message, message.step
                if message.saved:
                    rank.saved_step = message.step
            case Finished():
                rank.finished, rank.step, rank.done, rank.last_step_at = True, message.step, 1.0, report.at
            case Refused():
                rank.refused = message.error

    @property
    def pids(self) -> set[int]:
        return {rank.pid for rank in self.ranks.values()}

    @property
    def step(self) -> int:
        """The furthest step of any rank. Ranks are at most one step apart."""
        return max((rank.step for rank in self.ranks.values()), default=0)

    @property
    def saved_step(self) -> int | None:
        """The step of the newest known checkpoint."""
        saved = [rank.saved_step for rank in self.ranks.values() if rank.saved_step is not None]
        return max(saved, default=self.resumed)

    @property
    def was_saved_at_stop(self) -> bool:
        return any(stopped.saved for stopped in self.stopped)

    @property
    def starts_over(self) -> bool:
        """Whether the next start does not find what was saved at the stop."""
        return any(stopped.starts_over for stopped in self.stopped)

    @property
    def done(self) -> float | None:
        return next((rank.done for rank in self.ranks.values() if rank.done is not None), None)

    @property
    def eta_s(self) -> float | None:
        return next((rank.eta_s for rank in self.ranks.values() if rank.eta_s is not None), None)

    @property
    def finished(self) -> bool:
        return bool(self.ranks) and all(rank.finished for rank in self.ranks.values())

    @property
    def stopping(self) -> str | None:
        """The reason for which a rank stops; None: no rank does."""
        if self.terminated:
            return "SIGTERM"
        return next((rank.stopping for rank in self.ranks.values() if rank.stopping is not None), None)

    @property
    def stopped(self) -> list[Stopped]:
        return [rank.stopped for rank in self.ranks.values() if rank.stopped is not None]

    @property
    def refused(self) -> str | None:
        """The permanent failure that the launcher found or a rank reported, if there is one."""
        if self.refusal is not None:
            return self.refusal
        return next((rank.refused for rank in self.ranks.values() if rank.refused is not None), None)

    @property
    def first_step_at(self) -> float | None:
        return min((rank.first_step_at for rank in self.ranks.values() if rank.first_step_at is not None), default=None)

    @property
    def last_step_at(self) -> float | None:
        return max((rank.last_step_at for rank in self.ranks.values() if rank.last_step_at is not None), default=None)

    @property
    def last_report_at(self) -> float | None:
        """When any rank last reported; None: none has started."""
        return max((rank.last_report_at for rank in self.ranks.values()), default=None)
