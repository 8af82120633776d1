"""Power cuts at random moments of a job that saves and prunes checkpoints, on a real ext4 (see loopfs.py)."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from reprieve import ReprieveError
from tests.powercut.rigs.loopfs import LoopDisk, why_unavailable
from tests.powercut.rigs.promise import Job, check_promise

SEEDS, CUTS = (range(1, 9), 1_250) if os.environ.get("REPRIEVE_SOAK") else (range(1, 3), 50)

pytestmark = [
    pytest.mark.root,
    pytest.mark.soak,
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_power_cut_at_any_moment_loses_nothing_that_save_returned_for(seed: int) -> None:
    rng = random.Random(seed)
    returned = newest = cut_in_a_save = 0
    limit_s = 0.15
    """How late a cut may come. On a busy machine it grows, because some saves have to return."""
    with LoopDisk() as disk:
        root = disk.path / "checkpoints"
        for _ in range(CUTS):
            job = Job()
            cutter = threading.Timer(rng.uniform(0, limit_s), disk.cut)
            background, saving = rng.random() < 0.5, False
            if not background:
                cutter.start()
            try:
                checkpointer = job.checkpointer(root, keep=rng.choice([1, 2]))
                with checkpointer:
                    if background:  # to get memory ready takes as long as it takes until most cuts
                        checkpointer.warm_up(wait=True)
                        cutter.start()
                    step = newest
                    while True:
                        step += 1
                        job.at(step)
                        saving = True
                        checkpointer.save(step, background=background).wait()
                        saving = False
                        if disk.power_is_on:
                            returned = step
            except (ReprieveError, OSError):
                cut_in_a_save += saving
            cutter.join()
            disk.remount()
            limit_s = max(0.15, limit_s / 1.2) if returned > newest + 1 else limit_s * 1.2
            newest = check_promise(root, returned)
    assert returned > CUTS, "on average a save should return between two cuts"
    assert cut_in_a_save > CUTS / 5


def test_the_rig_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flushes turned off, cuts do lose checkpoints: the test above can fail."""
    from reprieve.storage.disk import Disk

    monkeypatch.setattr(Disk, "flush", lambda self, file: None)
    monkeypatch.setattr(Disk, "flush_folder", lambda self, path: None)
    lost = 0
    for _ in range(5):
        with LoopDisk() as disk:
            job = Job()
            checkpointer = job.checkpointer(disk.path / "checkpoints")
            for step in (1, 2, 3):
                job.at(step)
                checkpointer.save(step)
            checkpointer.wait()
            disk.cut()
            checkpointer.close()
            time.sleep(0.01)
            disk.remount()
            try:
                check_promise(disk.path / "checkpoints", 3)
            except (AssertionError, ReprieveError):
                lost += 1
    assert lost == 5
