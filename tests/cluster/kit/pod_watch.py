"""PodWatch: records every change of the pods in a namespace.

A deleted pod is gone 0.3 s after it ends, with its exit code, its termination message and the reason of its disruption:
only a watch sees them. A test starts the watch before it creates pods, and afterwards asks how each of them ended.
"""

from __future__ import annotations

import codecs
import json
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any

from tests.cluster.rig.kubectl import Kubectl

READ_BYTES = 1 << 16
POLL_S = 0.5
"""How soon a wait without changes notices that its time is over."""


@dataclass(frozen=True, kw_only=True)
class PodState:
    """A pod at one change."""

    at: float
    """When the change arrived, on the monotonic clock, in seconds."""
    uid: str
    name: str
    index: int | None
    """Of the pod in its indexed Job: the node rank of a TrainJob."""
    node: str
    phase: str
    is_deleting: bool
    is_gone: bool
    """The object no longer exists."""
    disruption: str
    """The reason of the condition DisruptionTarget, such as `EvictionByEvictionAPI`, or empty."""
    exit_code: int | None
    """Of the first container, once it has ended."""
    reason: str
    """Why the first container ended: `Completed`, `Error`, `OOMKilled`."""
    message: str
    """The termination message of the first container."""
    restarts: int
    pod: dict[str, Any]
    """The whole object."""

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None

    @property
    def is_running(self) -> bool:
        return self.phase == "Running" and not self.is_deleting and not self.has_ended


class PodWatch:
    """`with PodWatch(kubectl) as pods:` records changes until the block ends."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._states: list[PodState] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            kubectl.arguments("get", "pods", "--watch", "--output-watch-events", "--output", "json"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> PodWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    @property
    def states(self) -> list[PodState]:
        """All changes so far, in order."""
        with self._changed:
            return list(self._states)

    def latest(self) -> list[PodState]:
        """The newest state of each pod, gone or not, in the order in which the pods appeared."""
        return list({state.uid: state for state in self.states}.values())

    def ended(self) -> list[PodState]:
        """The last state of each pod whose container has ended, in the order in which they ended."""
        first_seen: dict[str, float] = {}
        for state in self.states:
            if state.has_ended:
                first_seen.setdefault(state.uid, state.at)
        ended = [state for state in self.latest() if state.has_ended]
        return sorted(ended, key=lambda state: first_seen[state.uid])

    def spans(self) -> dict[str, tuple[datetime, datetime]]:
        """When the first container of each ended pod ran, by the pod's uid, in the kubelet's whole seconds.

        A pod that was stopped before its container ran has no times, and is left out. If the kubelet loses a container,
        it reports an end without times, so the first report with times counts; a pod that was seen running and has
        none at all is an error.
        """
        found: dict[str, tuple[datetime, datetime]] = {}
        ran: set[str] = set()
        for state in self.states:
            container = _first_container(state.pod).get("state", {})
            end = container.get("terminated", {})
            if "running" in container:
                ran.add(state.uid)
            if end.get("startedAt") and end.get("finishedAt"):
                times = datetime.fromisoformat(end["startedAt"]), datetime.fromisoformat(end["finishedAt"])
                found.setdefault(state.uid, times)
        lost = [state.name for state in self.latest() if state.has_ended and state.uid in ran - found.keys()]
        assert not lost, f"the kubelet does not report when {lost} ended\n{self.history()}"
        return found

    def running(self) -> list[PodState]:
        return [state for state in self.latest() if state.is_running and not state.is_gone]

    def wait_for(self, condition: Callable[[PodWatch], bool], what: str, *, timeout_s: float = 60) -> None:
        """Wait until a condition over the recorded states holds: `wait_for(lambda pods: len(pods.ended()) == 2, …)`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition(self):
                if self._process.poll() is not None:
                    raise RuntimeError(f"the watch over pods ended with {self._process.returncode}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{what}: not after {timeout_s:.0f} s; pods:\n{self.history()}")
                self._changed.wait(timeout=POLL_S)

    def history(self) -> str:
        """The changes as text, a line each, for the message of a failed test."""
        began = self.states[0].at if self.states else 0.0
        lines = []
        for state in self.states:
            facts = [
                f"{state.at - began:7.2f} s {state.name} {state.phase}",
                f"on {state.node}" if state.node else "",
                f"disruption={state.disruption}" if state.disruption else "",
                "deleting" if state.is_deleting else "",
                f"exit code {state.exit_code} ({state.reason})" if state.has_ended else "",
                f"restarts={state.restarts}" if state.restarts else "",
                "gone" if state.is_gone else "",
            ]
            lines.append(" ".join(filter(None, facts)))
        return "\n".join(lines)

    def _read(self) -> None:
        """Take JSON documents off kubectl's output, which has no separators."""
        decoder = json.JSONDecoder()
        text = codecs.getincrementaldecoder("utf-8")()  # a chunk may end within a character
        pending = ""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while chunk := output.read1(READ_BYTES):  # type: ignore[attr-defined]
                pending += text.decode(chunk)
                while pending := pending.lstrip():
                    try:
                        event, length = decoder.raw_decode(pending)
                    except json.JSONDecodeError:
                        break
                    pending = pending[length:]
                    with self._changed:
                        self._states.append(pod_state(event["object"], is_gone=event["type"] == "DELETED"))
                        self._changed.notify_all()


def pod_state(pod: dict[str, Any], *, is_gone: bool) -> PodState:
    """The facts of a pod that tests look at."""
    metadata, status = pod["metadata"], pod.get("status", {})
    index = metadata.get("labels", {}).get("batch.kubernetes.io/job-completion-index")
    container = _first_container(pod)
    end = container.get("state", {}).get("terminated", {})
    disruptions = [each for each in status.get("conditions", []) if each["type"] == "DisruptionTarget"]
    return PodState(
        at=time.monotonic(),
        uid=metadata["uid"],
        name=metadata["name"],
        index=int(index) if index is not None else None,
        node=pod["spec"].get("nodeName", ""),
        phase=status.get("phase", ""),
        is_deleting="deletionTimestamp" in metadata,
        is_gone=is_gone,
        disruption=disruptions[0].get("reason", "") if disruptions else "",
        exit_code=end.get("exitCode"),
        reason=end.get("reason", ""),
        message=end.get("message", ""),
        restarts=container.get("restartCount", 0),
        pod=pod,
    )


def _first_container(pod: dict[str, Any]) -> dict[str, Any]:
    statuses: list[dict[str, Any]] = pod.get("status", {}).get("containerStatuses") or [{}]
    return statuses[0]
