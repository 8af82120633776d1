"""`run_ranks`: real processes, how they end, faults in them, and all ways in which ranks find each other."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reprieve.errors import ConfigError
from reprieve.testing import fail, full_disk, kill, pause, run_ranks, slow_disk, start_ranks, terminate, values
from tests.support.jobs import rank_jobs
from tests.support.places import ROOT

pytestmark = pytest.mark.xdist_group("run_ranks")  # one fork server for all tests


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """The first call starts the server, which imports torch."""
    run_ranks(1, rank_jobs.rank_times, 1, backend=None)


def until(condition: Any, limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# How a rank ends


def test_values_by_rank() -> None:
    begun = time.monotonic()
    results = run_ranks(3, rank_jobs.rank_times, 10)
    assert time.monotonic() - begun < 15  # 0.3 s on an idle machine
    assert [result.value for result in results] == [0, 10, 20]
    assert [(result.rank, result.ok, result.exit_code, result.signal) for result in results] == [
        (rank, True, 0, None) for rank in range(3)
    ]
    assert values(results) == [0, 10, 20]


def test_an_exception() -> None:
    results = run_ranks(2, rank_jobs.raise_on, 1, ValueError, "the reason", backend=None)
    assert results[0].ok
    bad = results[1]
    assert bad.error is not None
    assert (bad.error.type, bad.error.message, bad.exit_code, bad.ok) == ("ValueError", "the reason", 1, False)
    assert "raise_on" in bad.error.traceback
    assert "rank 1 speaks" in bad.output
    with pytest.raises(AssertionError, match=r"rank 1 raised ValueError: the reason(.|\n)*speaks(.|\n)*raise_on"):
        values(results)


@pytest.mark.parametrize(("argument", "code"), [(143, 143), (None, 0), ("words", 1)])
def test_an_exit_code(argument: object, code: int) -> None:
    (result,) = run_ranks(1, rank_jobs.raise_on, 0, SystemExit, argument, backend=None)
    assert (result.exit_code, result.error and result.error.type) == (code, "SystemExit")
    if argument == "words":
        assert "words" in result.output


def test_a_rank_that_takes_too_long_shows_where_it_is() -> None:
    begun = time.monotonic()
    results = run_ranks(2, rank_jobs.wait_forever, timeout="1s", backend=None)
    assert time.monotonic() - begun < 15
    for result in results:
        assert (result.timed_out, result.ok, result.exit_code) == (True, False, None)
        assert result.signal == signal.SIGABRT
        assert 0.9 < result.seconds < 12
        assert "in wait_forever" in result.output
        assert "timed out and was killed" in str(result)


def test_and_where_its_workers_are() -> None:
    (result,) = run_ranks(1, rank_jobs.wait_for_a_worker, timeout="2s", backend=None)
    assert result.timed_out
    assert "in wait_for_a_worker" in result.output
    assert "in wait_forever" in result.output


def test_a_rank_that_does_not_even_hear_is_killed() -> None:
    (result,) = run_ranks(1, rank_jobs.stop_itself, timeout="500ms", backend=None)
    assert (result.timed_out, result.signal) == (True, signal.SIGKILL)


def test_a_rank_ends_as_a_script_does(tmp_path: Path) -> None:
    values(run_ranks(2, rank_jobs.leave_things_to_the_end, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atexit 0", "atexit 1", "thread 0", "thread 1"]


def test_signals_from_outside(tmp_path: Path) -> None:
    with start_ranks(2, rank_jobs.end_on_sigterm, tmp_path, backend=None) as ranks:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        ranks.signal(1, signal.SIGTERM)
        ranks.signal(0, signal.SIGKILL)
        killed, ended = ranks.wait()
        ranks.signal(1, signal.SIGTERM)  # the rank has ended
    assert (killed.signal, ended.exit_code) == (signal.SIGKILL, 143)
    assert str(killed).startswith("rank 0 was ended by SIGKILL")


def test_ranks_end_with_the_block(tmp_path: Path) -> None:
    with pytest.raises(KeyError), start_ranks(2, rank_jobs.end_on_sigterm, tmp_path, backend=None) as ranks:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        pids = ranks.pids
        raise KeyError
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", rank_jobs.A_RUN, tmp_path], cwd=ROOT)
    until(lambda: len(list(tmp_path.iterdir())) == 2, 120)
    descendants = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _descends(pid, parent.pid)]
    assert len(descendants) >= 3
    parent.kill()
    parent.wait()
    until(lambda: not any(_runs(pid) for pid in descendants))


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _runs(pid: int) -> bool:
    return _status(pid).get("State", "Z")[0] != "Z"


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        pid = int(_status(pid).get("PPid", 0))
        if pid == ancestor:
            return True
    return False


def test_the_environment_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "1")
    monkeypatch.setenv("TO_GO", "1")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "FROM_HERE", "TO_GO", "NEW")
    first, second = values(run_ranks(2, rank_jobs.environment, *names, env={"NEW": "x", "TO_GO": None}, backend=None))
    assert first == dict(zip(names, ("0", "2", "127.0.0.1", "1", None, "x"), strict=True))
    assert second["RANK"] == "1"


def test_ranks_draw_different_numbers() -> None:
    (one, two), (three, four) = values(run_ranks(2, rank_jobs.draw, backend=None))
    assert one != three
    assert two != four


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="'tcp' or 'folder'"):
        run_ranks(1, rank_jobs.draw, store="cloud")
    with pytest.raises(ConfigError, match="has a host"):
        run_ranks(1, rank_jobs.draw, store="folder", store_host=0)
    with pytest.raises(AttributeError, match="local"):
        run_ranks(1, lambda: None)


def test_a_script_runs_its_own_functions(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from reprieve.testing import run_ranks, values\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n    print(values(run_ranks(2, double, 21, store='folder', backend=None)))\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ("[42, 42]\n", 0), ended.stderr


def test_the_example_in_the_docs(tmp_path: Path) -> None:
    _, code, rest = (ROOT / "docs/testing.md").read_text().split("```", 2)
    script = tmp_path / "example.py"
    script.write_text(code.removeprefix("python\n"))
    printed = rest.split("```")[1].lstrip("\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert (ended.stdout, ended.returncode) == (printed, 0), ended.stderr


# torch.distributed


def test_a_process_group_is_there() -> None:
    assert values(run_ranks(3, rank_jobs.all_reduce)) == [[3.0, 3.0]] * 3


def test_a_function_may_make_its_own() -> None:
    assert values(run_ranks(3, rank_jobs.make_process_group_itself, backend=None)) == [[3.0, 3.0]] * 3


def test_nobody_takes_the_port_before_the_ranks_use_it() -> None:
    """It was free only for a moment: another process, or the store of the test, could get it. The rank then failed."""
    assert values(run_ranks(1, rank_jobs.take_the_groups_port, backend=None)) == ["EADDRINUSE"]


def test_a_collective_does_not_wait_for_ever_for_a_dead_rank() -> None:
    first, dead, last = run_ranks(3, rank_jobs.all_reduce_with_one_missing, group_timeout="5s", timeout="60s")
    assert dead.signal == signal.SIGKILL
    for result in (first, last):
        assert not result.timed_out
        assert result.error is not None
        assert result.error.type == "RuntimeError"


# Faults


@pytest.mark.parametrize("store", ["tcp", "folder"])
def test_ranks_agree_through_the_store(store: str) -> None:
    assert values(run_ranks(3, rank_jobs.save_together, 5, store=store, backend=None)) == [[[0, 1, 2]] * 5] * 3


@pytest.mark.parametrize("at", ["before save", "publish save"])
def test_a_killed_rank_is_missed(at: str) -> None:
    first, dead, last = run_ranks(3, rank_jobs.save_with_a_short_limit, faults=[kill(rank=1, at=at)], backend=None)
    assert (dead.signal, dead.exit_code, dead.value, dead.error) == (signal.SIGKILL, None, None, None)
    for result in (first, last):
        message, seconds = result.value
        assert message == "save: rank 1: did not arrive within 1 s"
        assert seconds < 10


def test_a_rank_killed_after_the_outcome_is_not_missed() -> None:
    first, dead, last = run_ranks(3, rank_jobs.save_together, 3, faults=[kill(1, "after save", nth=3)], backend=None)
    assert dead.signal == signal.SIGKILL
    assert values([first, last]) == [[[0, 1, 2]] * 3] * 2


def test_a_paused_rank_is_missed_and_hears_of_it() -> None:
    results = run_ranks(2, rank_jobs.save_with_a_short_limit, faults=[pause(1, "publish save", 3)], backend=None)
    assert [message for message, _ in values(results)] == ["save: rank 1: did not arrive within 1 s"] * 2
    assert 2.5 < results[1].value[1] < 15


def test_a_failure_at_a_point() -> None:
    faults = [fail(0, "publish save", OSError(5, "I/O error"), nth=2)]
    own, other = run_ranks(2, rank_jobs.save_together, 2, faults=faults, backend=None)
    assert own.error is not None
    assert other.error is not None
    assert own.error.type == "OSError"
    assert other.error.message == "save: rank 0: OSError: [Errno 5] I/O error"


def test_a_preemption_at_a_point() -> None:
    one, two = run_ranks(2, rank_jobs.named_point, faults=[terminate(rank=1, at="step 2")], backend=None)
    assert one.ok
    assert two.signal == signal.SIGTERM


def test_points_of_the_test_itself() -> None:
    short, long = values(run_ranks(2, rank_jobs.named_point, faults=[pause(1, "step 2", "700ms")], backend=None))
    assert short < 0.6
    assert 0.7 <= long < 10


def test_a_slow_disk(tmp_path: Path) -> None:
    faults = [slow_disk(rank=1, bytes_per_second="1MiB")]
    fast, slow = values(run_ranks(2, rank_jobs.write_file, tmp_path, 2**20, faults=faults, backend=None))
    assert fast < slow
    assert 0.9 < slow < 10


@pytest.mark.parametrize("after", [0, 100_000, 2**20 - 1])
def test_a_full_disk(tmp_path: Path, after: int) -> None:
    fine, full = run_ranks(
        2, rank_jobs.write_file, tmp_path, 2**20, faults=[full_disk(rank=1, after_bytes=after)], backend=None
    )
    assert fine.ok
    assert full.error is not None
    assert (full.error.type, "No space left" in full.error.message) == ("OSError", True)


def test_a_disk_that_is_just_not_full(tmp_path: Path) -> None:
    (result,) = run_ranks(1, rank_jobs.write_file, tmp_path, 2**20, faults=[full_disk(0, "1MiB")], backend=None)
    assert result.ok, str(result)


def test_room_on_a_full_disk(tmp_path: Path) -> None:
    """Removed files make room again, whatever their name; unreserved bytes count when they are written."""
    from reprieve.testing import FullDisk

    disk = FullDisk(10_000)
    disk.write_file(tmp_path / "small", bytes(6000))
    with pytest.raises(OSError, match="No space"):
        disk.write_file(tmp_path / "other", bytes(6000))
    with pytest.raises(OSError, match="No space"):
        disk.create(tmp_path / "reserved", 6000)
    assert not (tmp_path / "reserved").exists()
    disk.rename(tmp_path / "small", tmp_path / "renamed")
    disk.remove(tmp_path / "renamed")
    disk.remove(tmp_path / "other")
    disk.close(disk.create(tmp_path / "reserved", 10_000))
    assert disk.left_bytes == 0


# Ways in which ranks find their store


def test_the_stores_host_is_killed() -> None:
    """The others notice within seconds, although the limit is minutes."""
    dead, *others = run_ranks(
        3, rank_jobs.lose_the_store, store_host=0, faults=[kill(0, "publish stop")], backend=None, timeout="60s"
    )
    assert dead.signal == signal.SIGKILL
    for message in values(others):
        assert "the store at 127.0.0.1" in message


def test_a_rank_may_serve_the_store() -> None:
    assert values(run_ranks(3, rank_jobs.save_together, store_host=0)) == [[[0, 1, 2]]] * 3


def test_after_init_process_group() -> None:
    got = values(run_ranks(3, rank_jobs.detect_twice, env={"REPRIEVE_STORE": None, "RANK": None, "WORLD_SIZE": None}))
    assert got == [(rank, [[1] * 3, [2] * 3, [3] * 3]) for rank in range(3)]


def test_no_way_to_find_each_other() -> None:
    (kind, message), _ = values(run_ranks(2, rank_jobs.detect_or_explain, env={"REPRIEVE_STORE": None}, backend=None))
    assert kind == "ConfigError"
    assert "torchrun" in message
    assert "REPRIEVE_STORE" in message


def test_a_store_that_several_starts_share() -> None:
    """Each start has its own prefix."""
    from reprieve.ranks.torch_store import TorchStore

    store = TorchStore.serve()
    for start in range(2):
        env = {"REPRIEVE_STORE": f"tcp://127.0.0.1:{store.port}/start {start}"}
        assert values(run_ranks(2, rank_jobs.save_together, env=env, backend=None)) == [[[0, 1]]] * 2
    store.close()


@pytest.mark.parametrize("address", ["tcp://nowhere", "/folder", "file://host/folder", "redis://host:1"])
def test_an_address_that_is_none(address: str) -> None:
    (kind, message), _ = values(
        run_ranks(2, rank_jobs.detect_or_explain, env={"REPRIEVE_STORE": address}, backend=None)
    )
    assert kind == "ConfigError"
    assert address in message


def test_a_world_of_one_needs_nothing() -> None:
    nothing = {"REPRIEVE_STORE": None, "WORLD_SIZE": None, "RANK": None}
    assert values(run_ranks(1, rank_jobs.detect_or_explain, env=nothing, backend=None)) == [1]
    assert values(run_ranks(1, rank_jobs.detect_or_explain, env=nothing)) == [1]


def test_under_torchrun_before_the_process_group_exists(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys, torch.distributed as dist\n"
        "from tests.support.jobs.rank_jobs import detect_twice\n"
        "assert not dist.is_initialized()\n"
        "early = detect_twice()\n"
        "dist.init_process_group('gloo')\n"
        "late = detect_twice()\n"
        "dist.destroy_process_group()\n"
        "open(sys.argv[1] + '/found ' + os.environ['RANK'], 'w').write(json.dumps([early, late]))\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [*launch, script, tmp_path], env=environment, capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        want = [rank, [[1, 1], [2, 2], [3, 3]]]
        assert json.loads((tmp_path / f"found {rank}").read_text()) == [want, want]


def _huge_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["AnonHugePages"].split()[0]) * 1024


@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (6, 1), reason="MADV_COLLAPSE: Linux 6.1")
def test_ranks_are_forked_from_huge_pages() -> None:
    """With torch imported, a fork in pages of 4 KiB takes three times as long."""
    [huge] = values(run_ranks(1, _huge_bytes, backend=None))
    assert huge > 100 * 2**20
