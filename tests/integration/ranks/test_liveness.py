"""A rank that silently dies or hangs does not hang the others."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.verify import verify
from reprieve.errors import RankFailed
from reprieve.ranks.group import Ranks
from reprieve.ranks.liveness import Liveness
from reprieve.testing import run_ranks, start_ranks, values
from tests.support.jobs.loop_jobs import Job, train
from tests.support.launchers import wait_for_steps

LIMIT = timedelta(seconds=2)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_the_others_end_within_a_set_time(number: signal.Signals, tmp_path: Path) -> None:
    """A suspended rank keeps its connections: gloo waits for it, as NCCL waits for a dead one."""
    options = (("rank_timeout", "4s"), ("exit_wait", "2s"))
    job = Job(str(tmp_path), kind="ddp", epochs=200, every=2, step_s=0.01, options=options)
    with start_ranks(3, train, job, timeout="100s", group_timeout="90s") as ranks:
        wait_for_steps(job, 5)
        ranks.signal(1, number)
        began = time.monotonic()
        while sum(alive(pid) for pid in ranks.pids) > (number == signal.SIGSTOP):
            assert time.monotonic() - began < 40
            time.sleep(0.05)
        ranks.signal(1, signal.SIGKILL)
        results = ranks.wait()
    for rank in (0, 2):
        assert results[rank].exit_code == 1, results[rank]
    if number == signal.SIGSTOP:
        assert any("rank 1: sent no heartbeat for 4 s" in results[rank].output for rank in (0, 2)), results[0]
    newest = list_checkpoints(tmp_path / "checkpoints")[0]
    verify(newest.path, BlockPool())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def beats(seconds: float) -> list[str]:
    dead: list[RankFailed] = []
    ranks = Ranks.detect()
    liveness = Liveness(ranks, LIMIT, dead.append)
    time.sleep(seconds)
    liveness.close()
    ranks.agree("end")
    return [str(error) for error in dead]


def test_who_beats_is_alive_and_who_left_is_not_dead() -> None:
    assert values(run_ranks(3, beats, LIMIT.total_seconds() * 1.5, backend=None)) == [[], [], []]
