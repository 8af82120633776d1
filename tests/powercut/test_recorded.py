"""Every write of a job to its disk is recorded, and every crash that could have happened in between is checked:
each prefix of the writes, and random subsets of those that were not flushed yet (see recorder.py, replay.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.powercut.rigs.promise import Job, check_visible
from tests.powercut.rigs.recorder import Recorder, why_unavailable
from tests.powercut.rigs.replay import CrashState, check_crashes

SUBSETS = 20_000 if os.environ.get("REPRIEVE_SOAK") else 1200

pytestmark = [
    pytest.mark.root,
    pytest.mark.soak,
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]


def test_no_crash_between_two_writes_breaks_the_promise() -> None:
    with Recorder() as recorder:
        job = Job()
        checkpointer = job.checkpointer(recorder.path / "checkpoints", keep=2)
        for step in range(1, 6):
            job.at(step)
            checkpointer.save(step)
            recorder.mark(f"saved {step}")
        checkpointer.save(step, replace=True)
        checkpointer.wait()
        recorder.mark("retired")
        checkpointer.close()
        log = recorder.stop()

    def check(path: Path, state: CrashState) -> None:
        saved = [int(mark.split()[1]) for mark in state.marks if mark.startswith("saved")]
        check_visible(path / "checkpoints", max(saved, default=0))

    outcome = check_crashes(log, recorder.base, check, subsets=SUBSETS)
    assert outcome.failures == []
    assert outcome.subsets >= 1000
    print(f"{outcome.states} crash states, {outcome.subsets} of them subsets, of {len(log)} log entries")


def test_the_recorder_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flushes, some of the crash states break the promise: the test above can fail."""
    from reprieve.storage.disk import Disk

    monkeypatch.setattr(Disk, "flush", lambda self, file: None)
    with Recorder() as recorder:
        job = Job()
        with job.checkpointer(recorder.path / "checkpoints") as checkpointer:
            for step in (1, 2):
                job.at(step)
                checkpointer.save(step)
                recorder.mark(f"saved {step}")
        log = recorder.stop()

    def check(path: Path, state: CrashState) -> None:
        check_visible(path / "checkpoints", 2 if "saved 2" in state.marks else 1 if "saved 1" in state.marks else 0)

    assert check_crashes(log, recorder.base, check, subsets=300).failures
