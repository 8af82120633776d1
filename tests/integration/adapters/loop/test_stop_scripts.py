"""Scripts as people write them: how they end after a stop request.

Each is a loop of short steps, with something of its own before, in or after it. Some run in an interpreter that is
started for them, the others, to save the time of importing torch, in a fork of one that has it.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.verify import verify
from reprieve.testing import start_ranks
from tests.support.places import HIDE_OPTIONAL

SLACK_S = 15.0
"""What a busy machine may add. What hangs here would hang for 60 s."""

BEFORE = """
import atexit, asyncio, multiprocessing, os, signal, sys, threading, time
import torch
import reprieve

torch.set_num_threads(1)


def make_run():
    global model, optimizer, run
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = reprieve.Run("checkpoints", model=model, optimizer=optimizer, every=None, notices="off", exit_wait=1)


def step():
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
    run.step()
    time.sleep(0.01)
    if run.steps == 3:
        open("training", "w").close()
"""


@dataclass(frozen=True)
class Ended:
    code: int
    said: str
    seconds: float
    """From the signal on."""


def in_an_interpreter_of_its_own(folder: Path, script: str) -> Ended:
    (folder / "script.py").write_text(BEFORE + textwrap.dedent(script))
    with (folder / "output").open("w") as output, subprocess.Popen(
        [sys.executable, "script.py"], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **HIDE_OPTIONAL},
        stdout=output, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            _until_it_trains(folder)
            process.send_signal(signal.SIGTERM)
            told = time.monotonic()
            code = process.wait(50)
        finally:
            process.kill()
    return Ended(code, (folder / "output").read_text(), time.monotonic() - told)


def in_a_fork(folder: Path, script: str) -> Ended:
    (folder / "script.py").write_text(BEFORE + textwrap.dedent(script))
    with start_ranks(1, _main, str(folder), backend=None, timeout="50s") as ranks:
        _until_it_trains(folder)
        ranks.signal(0, signal.SIGTERM)
        told = time.monotonic()
        [result] = ranks.wait()
    assert result.exit_code is not None, str(result)
    return Ended(result.exit_code, result.output, time.monotonic() - told)


def _main(folder: str) -> None:
    os.chdir(folder)
    runpy.run_path("script.py", run_name="__main__")


def _until_it_trains(folder: Path) -> None:
    end = time.monotonic() + 60
    while not (folder / "training").exists():
        assert time.monotonic() < end, "it does not train"
        time.sleep(0.01)


def assert_stopped(folder: Path, ended: Ended) -> None:
    assert ended.code == 143, ended.said
    assert "stop requested: SIGTERM" in ended.said, ended.said
    assert "saved step" in ended.said, ended.said
    assert ended.seconds < SLACK_S
    assert ended.said.count("saved step") == 1
    [newest] = list_checkpoints(folder / "checkpoints")
    assert f"saved step {newest.step} " in ended.said
    verify(newest.path, BlockPool())


LOOP = """
make_run()
for epoch in run.epochs(1000):
    for batch in run.batches(range(100)):
        step()
"""

HANGING = {
    "a finally": """
        make_run()
        try:
            for epoch in run.epochs(1000):
                for batch in run.batches(range(100)):
                    step()
        finally:
            time.sleep(60)
        """,
    "an atexit handler": LOOP.replace("run()\n", "run()\natexit.register(time.sleep, 60)\n"),
    "a thread": "threading.Thread(target=time.sleep, args=(60,)).start()" + LOOP,
}

CATCHING = {
    "in the body": """
        make_run()
        for epoch in run.epochs(1000):
            batches = run.batches(range(100))
            while True:
                try:
                    next(batches)
                    step()
                except StopIteration:
                    break
                except BaseException as error:
                    print("caught", type(error).__name__, flush=True)
        """,
    "around a pass": """
        make_run()
        for epoch in run.epochs(1000):
            try:
                for batch in run.batches(range(100)):
                    step()
            except BaseException as error:
                print("caught", type(error).__name__, flush=True)
        """,
    "in a loop without batches": """
        make_run()
        for number in range(run.steps, 10000):
            try:
                step()
            except BaseException as error:
                print("caught", type(error).__name__, flush=True)
        """,
    "and exits with 0": """
        make_run()
        try:
            for epoch in run.epochs(1000):
                for batch in run.batches(range(100)):
                    step()
        except BaseException as error:
            print("caught", type(error).__name__, flush=True)
            sys.exit(0)
        """,
}


@pytest.mark.parametrize("what", HANGING)
def test_something_hangs_at_the_end(tmp_path: Path, what: str) -> None:
    ended = in_an_interpreter_of_its_own(tmp_path, HANGING[what])
    assert_stopped(tmp_path, ended)
    assert "still running 1 s later: ending the process now, with exit code 143" in ended.said


@pytest.mark.parametrize("where", CATCHING)
def test_everything_is_caught(tmp_path: Path, where: str) -> None:
    ended = in_a_fork(tmp_path, CATCHING[where])
    assert_stopped(tmp_path, ended)
    assert "caught Preempted" in ended.said
    again = ("could not be saved", "is saved already", "nothing to save")
    assert not any(words in ended.said for words in again), "stopped once"


def test_children_work_as_without(tmp_path: Path) -> None:
    """A pool, a process that is terminated, and a subprocess: all made while signals are listened for."""
    ended = in_a_fork(
        tmp_path,
        """
        def double(number):
            return 2 * number

        if __name__ == "__main__":
            make_run()
            context = multiprocessing.get_context("fork")
            with context.Pool(2) as pool:
                print("pool", pool.map(double, range(4)))
                pool.apply_async(time.sleep, (60,))
                time.sleep(0.2)
            process = context.Process(target=time.sleep, args=(60,))
            process.start()
            time.sleep(0.2)
            process.terminate()
            process.join(10)
            print("terminated", process.exitcode)
            for epoch in run.epochs(1000):
                for batch in run.batches(range(100)):
                    step()
        """,
    )
    assert_stopped(tmp_path, ended)
    assert "pool [0, 2, 4, 6]" in ended.said
    assert f"terminated {-signal.SIGTERM}" in ended.said
    assert ended.said.index("terminated") < ended.said.index("stop requested: ")


@pytest.mark.parametrize("order", ["before", "after"])
def test_asyncio_drives_the_loop_and_has_a_handler_of_its_own(tmp_path: Path, order: str) -> None:
    """Added before the run is made, and after it: then asyncio has taken the signal away."""
    lines = ["make_run()", "asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print, 'theirs')"]
    first, second = lines if order == "after" else reversed(lines)
    ended = in_a_fork(
        tmp_path,
        f"""
        async def main():
            {first}
            {second}
            for epoch in run.epochs(1000):
                for batch in run.batches(range(100)):
                    step()
                    await asyncio.sleep(0)

        asyncio.run(main())
        """,
    )
    assert_stopped(tmp_path, ended)
    assert ended.said.count("theirs") == 1, ended.said


def test_a_handler_that_was_there_before_is_called_once_after_the_save(tmp_path: Path) -> None:
    ended = in_a_fork(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda number, frame: print('theirs', number, flush=True))" + LOOP,
    )
    assert_stopped(tmp_path, ended)
    assert ended.said.count("theirs 15") == 1
    assert ended.said.index("saved step") < ended.said.index("theirs 15")
