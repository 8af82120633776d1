"""What the driver reports to `reprieve run`."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from reprieve.adapters.ray.launcher_reports import LauncherReports
from reprieve.adapters.ray.progress import PROGRESS
from reprieve.launcher_protocol import LAUNCHER_SOCKET, Report, Saved
from reprieve.progress.tracker import Tracker
from tests.support.memory_store import MemoryStore


def test_a_checkpoint_is_reported_with_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of progress may come steps later."""
    monkeypatch.setenv(LAUNCHER_SOCKET, str(tmp_path / "launcher"))
    tracker, store = Tracker(), MemoryStore()
    tracker.saved("/run/checkpoint-4", step=4)
    tracker.step(9)
    store.set(PROGRESS, tracker.snapshot().to_json())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(str(tmp_path / "launcher"))
        launcher.settimeout(20)
        reports = LauncherReports("/run", lambda: store)
        datagrams = [Report.from_json(launcher.recv(2**16)) for _ in range(4)]
        reports.close()
        reports._reporter.close()
    [saved] = [each.message for each in datagrams if each is not None and isinstance(each.message, Saved)]
    assert (saved.step, saved.path) == (4, "/run/checkpoint-4")
