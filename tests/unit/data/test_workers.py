"""The worker processes of a DataLoader: signals, how they end, what they cost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from reprieve.data.resumable_loader import ResumableLoader
from reprieve.data.workers import signals as worker_signals
from tests.support.data_kit import Augmented, Plain, RandomCollator, bare, same, through
from tests.support.places import ROOT


@pytest.fixture
def shielded() -> Iterator[None]:
    signals = [signal.SIGTERM, signal.SIGUSR1]
    worker_signals.shield(signals)
    yield
    worker_signals.unshield(signals)


class WorkerPids(Plain):
    def __getitem__(self, index: int) -> Any:
        return os.getpid()


class Stuck(Plain):
    def __getitem__(self, index: int) -> Any:
        time.sleep(60)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize(
    ("kind", "context", "persistent"),
    [
        ("reprieve's", "fork", False),
        ("the script's", "fork", True),
        ("the script's", "spawn", False),
        ("the script's", "forkserver", True),
        ("torchdata's", "fork", False),
        ("torchdata's", "forkserver", False),
    ],
)
def test_workers_of_any_loader_survive_what_stops_a_run(kind: str, context: str, persistent: bool) -> None:
    """Workers also survive signals before they are ready: spawned workers take a second to import torch."""
    if kind == "torchdata's":
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    else:
        Loader = DataLoader
    signals = [signal.SIGTERM, signal.SIGUSR1]
    worker_signals.shield(signals)
    try:
        loader = Loader(
            WorkerPids(), batch_size=1, num_workers=2, multiprocessing_context=context, persistent_workers=persistent
        )
        source = ResumableLoader(loader)
        batches = source.start() if kind == "reprieve's" else iter(loader)
        if kind != "reprieve's":
            workers = batches._workers
            for worker in workers:
                _signal(worker.pid, signals)
        pids = {int(next(batches)), int(next(batches))}
        assert len(pids) == 2
        for pid in pids:
            _signal(pid, signals)
        assert {int(batch) for batch in batches} == pids
    finally:
        worker_signals.unshield(signals)
        source.end_workers()


def test_workers_of_a_library_that_is_imported_during_the_run_survive_too() -> None:
    script = """
        import os, signal, sys, warnings
        from reprieve.data.workers import signals as worker_signals
        from tests.unit.data.test_workers import WorkerPids
        for _ in range(2):  # a second session in the same process
            worker_signals.shield([signal.SIGTERM])
        assert not any(name.startswith("torchdata") for name in sys.modules)
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        from torchdata.stateful_dataloader import StatefulDataLoader
        batches = iter(StatefulDataLoader(WorkerPids(), batch_size=1, num_workers=1))
        os.kill(int(next(batches)), signal.SIGTERM)
        print(len(list(batches)))
    """
    assert _run(script).stdout == "22\n"


def _signal(pid: int, signals: list[signal.Signals]) -> None:
    for number in signals:
        os.kill(pid, number)


def test_workers_are_as_always_where_no_run_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_signals, "_signals", Counter())  # other tests in this process leave entries
    batches = iter(DataLoader(WorkerPids(), batch_size=1, num_workers=1))
    os.kill(int(next(batches)), signal.SIGTERM)
    with pytest.raises((RuntimeError, ConnectionError, EOFError)):  # depends on where the worker was when it died
        list(batches)


def test_other_processes_of_a_fork_server_can_be_terminated(shielded: None) -> None:
    list(DataLoader(Plain(), num_workers=1, multiprocessing_context="forkserver"))
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(20)
    assert process.exitcode == -signal.SIGTERM


def test_workers_survive_it_while_they_start() -> None:
    """A signal to the whole process group may come before a worker is ready."""
    script = """
        import os, signal, sys, threading, time
        from torch.utils.data import DataLoader
        from tests.unit.data.test_workers import WorkerPids
        from reprieve.data.workers import signals as worker_signals
        from reprieve.data.resumable_loader import ResumableLoader
        worker_signals.shield([signal.SIGTERM])
        signal.signal(signal.SIGTERM, lambda *_: None)
        over = threading.Event()
        def shower():
            while not over.is_set():
                os.killpg(0, signal.SIGTERM)
                time.sleep(0.001)
        threading.Thread(target=shower, daemon=True).start()
        source = ResumableLoader(DataLoader(WorkerPids(), batch_size=1, num_workers=2))
        assert len(list(source.start())) == 23
        over.set()
        print("done")
    """
    assert _run(script).stdout == "done\n"


@pytest.mark.parametrize("persistent", [False, True])
def test_stuck_workers_are_ended(persistent: bool, shielded: None) -> None:
    loader = DataLoader(Stuck(), num_workers=2, persistent_workers=persistent, timeout=0.2)
    source = ResumableLoader(loader)
    loader_pass = source.start()
    with pytest.raises(RuntimeError, match="timed out"):
        next(loader_pass)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    began = time.monotonic()
    source.end_workers()
    assert time.monotonic() - began < 10
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, -signal.SIGKILL]


def test_idle_workers_end_when_asked(shielded: None) -> None:
    source = ResumableLoader(DataLoader(Plain(), num_workers=2, persistent_workers=True))
    list(source.start())
    workers = multiprocessing.active_children()
    source.end_workers()
    assert [worker.exitcode for worker in workers] == [0, 0], "none had to be killed"


@pytest.mark.parametrize("dataset", ["Stuck", "Plain"])
def test_a_program_ends_though_its_workers_ignore_sigterm(dataset: str) -> None:
    script = f"""
        import signal, sys
        from torch.utils.data import DataLoader
        from tests.unit.data.test_workers import Plain, Stuck
        from reprieve.data.workers import signals as worker_signals
        from reprieve.data.resumable_loader import ResumableLoader
        worker_signals.shield([signal.SIGTERM])
        source = ResumableLoader(DataLoader({dataset}(), num_workers=2, persistent_workers=True))
        one = source.start()
        def stop(*_): raise SystemExit(7)
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        while True:
            for batch in source.start(): pass
    """
    began = time.monotonic()
    assert "DataLoader worker" not in _run(script, code=7).stderr
    assert time.monotonic() - began < 15


def _run(script: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        start_new_session=True,
    )
    assert done.returncode == code, done.stderr
    return done


def _init(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Augmented)
    info.dataset.size = 23
    torch.rand(())


def test_the_users_init_and_spawned_workers() -> None:
    contexts = iter(["fork", "fork", "spawn"])  # spawning takes seconds: only the resumed pass does it

    def make() -> Any:
        return DataLoader(
            Augmented(),
            batch_size=4,
            shuffle=True,
            num_workers=2,
            worker_init_fn=_init,
            collate_fn=RandomCollator(),
            multiprocessing_context=next(contexts),
        )

    expected = bare(make, epochs=1)
    assert same(through(make, [(0, 3)], epochs=1), expected)


def test_the_users_loader_stays_as_it_is() -> None:
    loader = DataLoader(Plain(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    before = dict(vars(loader))
    source = ResumableLoader(loader)
    for _ in source.start({"consumed": 1}):
        pass
    source.end_workers()
    assert vars(loader) == before


def test_what_it_costs() -> None:
    """A mark takes a microsecond. The bound is loose, because other processes share the machine."""
    source = ResumableLoader(DataLoader(Augmented(2000), batch_size=2, num_workers=1, collate_fn=RandomCollator()))
    loader_pass = source.start()
    next(loader_pass)
    began = time.perf_counter()
    for _ in range(10_000):
        loader_pass.mark()
    assert (time.perf_counter() - began) / 10_000 < 10e-6
    source.end_workers()


def test_a_deterministic_dataset_ships_nothing() -> None:
    source = ResumableLoader(DataLoader(Plain(), batch_size=4, num_workers=2))
    loader_pass = source.start()
    for _ in range(3):
        next(loader_pass)
    loader_pass.mark()
    assert loader_pass.state()["workers"] == [{}, {}]
    source.end_workers()


def test_order_without_order(caplog: pytest.LogCaptureFixture) -> None:
    ResumableLoader(DataLoader(Plain(), num_workers=2, in_order=False))
    assert "in_order=False" in caplog.text


def test_batches_are_pinned_as_in_stock() -> None:
    class Pinnable:
        def pin_memory(self) -> str:
            return "pinned"

    pinned = pin_memory(([Pinnable(), 3], 1, b"rng", None), "cuda")
    assert list(pinned) == [["pinned", 3], 1, b"rng", None]
