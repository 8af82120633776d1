"""A second live run with the name and storage path of another is refused; a dead one blocks nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reprieve.adapters.ray import run_folder
from reprieve.adapters.ray.run_folder import claim_run_folder
from reprieve.errors import FolderInUse
from tests.support.helpers import FakeClock

_HOLDER = """
import sys, time
from pathlib import Path
from reprieve.adapters.ray.run_folder import claim_run_folder
claim_run_folder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


class Holder:
    """Another controller that holds the folder."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"held\n"
        self.pid = self._process.pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_a_second_live_run_is_refused_with_folder_and_holder(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    with Holder(tmp_path) as holder, pytest.raises(FolderInUse) as refused:
        claim_run_folder(tmp_path, clock=clock)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path} is in use by another live run of this name (process {holder.pid} on ")
    assert "another RunConfig(name=…) or storage_path" in message
    assert clock.slept == 15
    assert sum("waiting up to" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("in_pod", [False, True])
def test_the_next_run_after_one_that_ended_does_not_wait(
    in_pod: bool, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for _ in range(3):
        lease = claim_run_folder(tmp_path, clock=clock)
        assert lease is not None
        with pytest.raises(FolderInUse):  # also a second `fit()` of this process
            claim_run_folder(tmp_path, clock=FakeClock())
        lease.release()
    assert clock.slept == 0


def test_a_controller_that_was_killed_blocks_nobody(tmp_path: Path, clock: FakeClock) -> None:
    with Holder(tmp_path) as holder:
        holder.kill()
        lease = claim_run_folder(tmp_path, clock=clock)
    assert lease is not None and clock.slept == 0
    lease.release()


def test_a_controller_that_is_about_to_end_is_waited_for(tmp_path: Path, clock: FakeClock) -> None:
    """It outlives a killed driver by a few seconds."""
    with Holder(tmp_path) as holder:
        clock.on_sleep = lambda: clock.slept < 3 or holder.kill()
        lease = claim_run_folder(tmp_path, clock=clock)
    assert lease is not None and clock.slept == 3
    lease.release()


def test_a_dead_holder_on_another_host_blocks_nobody(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock cannot be seen from here, and its heartbeat stands still."""
    with Holder(tmp_path) as holder:
        holder.kill()
    monkeypatch.setattr("reprieve.checkpoint.folder.lease.boot_id", lambda: "another")
    lease = claim_run_folder(tmp_path, clock=clock)
    assert lease is not None and clock.slept < 20
    lease.release()


def test_a_folder_that_cannot_hold_a_lease_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / run_folder.FOLDER).write_text("a file")
    assert claim_run_folder(tmp_path) is None
    assert "cannot be claimed for this run" in caplog.text


def test_the_lease_of_checkpoints_in_the_same_run_is_another_one(tmp_path: Path) -> None:
    lease = claim_run_folder(tmp_path)
    assert lease is not None
    assert {path.name for path in tmp_path.iterdir()} == {"reprieve-driver"}
    lease.release()
