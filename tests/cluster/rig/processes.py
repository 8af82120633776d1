"""Starts the processes of a cluster, each with a log of its own, and notices when one of them ends.

They outlive `up`: nothing waits for them, and `down` finds them by their cgroup.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.cluster.rig.errors import RigError
from tests.cluster.rig.layout import Instance
from tests.cluster.rig.network import inside
from tests.cluster.rig.prerequisites import SYSTEM_PATH

POLL_S = 0.1
LOG_TAIL_BYTES = 3000


class Processes:
    """The processes that this `up` has started."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        instance.logs.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        command: list[str],
        *,
        prefix: list[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a command in the cluster's network namespace, and behind another prefix if given."""
        with self._log(name).open("ab") as log:
            process = subprocess.Popen(
                [*inside(self._instance), *(prefix or []), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._instance.state,
                env=clean_environment(environment or {}),
                start_new_session=True,
            )
        self._started[name] = process

    def wait_until(self, what: str, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait for a condition; fail at once, with the end of its log, when a process has ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, process in self._started.items():
                if process.poll() is not None:
                    raise RigError(
                        f"{name} ended with {process.returncode}; end of {self._log(name)}:\n{self._tail(name)}"
                    )
            if time.monotonic() > deadline:
                raise RigError(f"{what}: not after {timeout_s:.0f} s; the logs are in {self._instance.logs}")
            time.sleep(POLL_S)

    def _log(self, name: str) -> Path:
        return self._instance.logs / f"{name}.log"

    def _tail(self, name: str) -> str:
        return self._log(name).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The system's PATH and nothing from the caller: proxies and the like would reach into the cluster."""
    return {"PATH": SYSTEM_PATH, "HOME": os.environ.get("HOME", "/root"), **extra}
