"""What a training process tells the launcher that started it: small JSON datagrams over a Unix socket.

    starting → started → restored → step … → saved → … → stopping → stopped | finished | refused

`REPRIEVE_LAUNCHER` names the socket; without it nothing is told, and nothing costs anything. Training is never
disturbed: a launcher that does not read loses reports of steps at once, and others after a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

LAUNCHER = "REPRIEVE_LAUNCHER"
STEP_EVERY_S = 0.2
_PATIENCE_S = 1.0
_LONGEST = 8_000
"""Characters of one text: a datagram has to fit into the socket's buffer as a whole."""

STARTING, STARTED, RESTORED, STEP, SAVED, STOPPING, STOPPED, FINISHED, REFUSED = (
    "starting",
    "started",
    "restored",
    "step",
    "saved",
    "stopping",
    "stopped",
    "finished",
    "refused",
)
"""`restored`: only in a drill, with fingerprints of what is in memory again."""
TORCH, PROTECTED = "torch", "protected"
"""A process has imported torch: it probably trains. It will train with Reprieve: it has loaded what protects it."""
TERMINATED, CRASHED = "terminated", "crashed"
"""From torchrun. SIGTERM ended one of its ranks, or was sent to torchrun itself; a rank failed, and torchrun is about
to end the others with SIGTERM."""


def report_process(event: str, **facts: Any) -> None:
    """Report something of this process, which is no rank, or none yet."""
    with contextlib.closing(Reporter(-1, 0)) as reporter:
        reporter.send(event, **facts)


class Reporter:
    """Of one rank. From any thread."""

    def __init__(self, rank: int, world_size: int, path: str | None = None) -> None:
        """`path`: the launcher's socket; default: from the environment."""
        self._who = {"rank": rank, "world_size": world_size}
        self._path = path if path is not None else os.environ.get(LAUNCHER, "")
        self._socket: socket.socket | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        if self._path:
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    @property
    def heard(self) -> bool:
        """Is there somebody to tell?"""
        return self._socket is not None

    def send(self, event: str, **facts: Any) -> None:
        """What the launcher has to know. Waits a second if it has to."""
        self._send(event, facts, _PATIENCE_S)

    def step(self, step: int, **facts: Any) -> None:
        """How far the run is. Not waited for."""
        self._send(STEP, {"step": step, **facts}, 0.0)

    def _send(self, event: str, facts: dict[str, Any], patience_s: float) -> None:
        if self._socket is None or os.getpid() != self._pid:
            return
        # The clock is one for all processes of a machine; the launcher may read this later.
        told = {"event": event, "pid": self._pid, "at": time.monotonic(), **self._who}
        told |= {name: one[:_LONGEST] if isinstance(one, str) else one for name, one in facts.items()}
        data = json.dumps(told, default=str).encode()
        with self._lock, contextlib.suppress(OSError):  # gone, or busy
            self._socket.settimeout(patience_s)
            self._socket.sendto(data, self._path)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
