"""Tools to test distributed training with real processes, real signals, and faults that read as scenarios.

    from reprieve.testing import kill, run_ranks

    results = run_ranks(3, save_together, folder, faults=[kill(rank=1, at="publish commit")])
    assert results[1].signal == signal.SIGKILL
    assert results[0].error.type == "RankFailed"

All names below are public API.
"""

from __future__ import annotations

from reprieve.testing.faults import Fault, fail, full_disk, kill, pause, slow_disk, terminate
from reprieve.testing.faulty_disks import FullDisk, SlowDisk
from reprieve.testing.rank_process import disk
from reprieve.testing.result import Failure, Result, values
from reprieve.testing.runner import RunningRanks, run_ranks, start_ranks

__all__ = [
    "Failure",
    "Fault",
    "FullDisk",
    "Result",
    "RunningRanks",
    "SlowDisk",
    "disk",
    "fail",
    "full_disk",
    "kill",
    "pause",
    "run_ranks",
    "slow_disk",
    "start_ranks",
    "terminate",
    "values",
]
