"""What ranks run in the tests of `run_ranks`: small functions, in a module that children import quickly."""

from __future__ import annotations

import atexit
import errno
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from reprieve.errors import StoreLost
from reprieve.ranks.failpoints import reached
from reprieve.ranks.group import Ranks
from reprieve.testing import disk

LIMIT = timedelta(seconds=20)


def rank_times(factor: int) -> int:
    return int(os.environ["RANK"]) * factor


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def raise_on(rank: int, kind: type[BaseException], *args: Any) -> str:
    print(f"rank {os.environ['RANK']} speaks")
    if int(os.environ["RANK"]) == rank:
        raise kind(*args)
    return "fine"


def all_reduce() -> list[float]:
    import torch
    import torch.distributed as dist

    tensor = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor.tolist()  # type: ignore[no-any-return]


def all_reduce_with_one_missing() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce()


def take_the_groups_port() -> str:
    """Take the port as a process does that does not know whose it is. Returns the error."""
    with socket.socket() as another:
        try:
            another.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        except OSError as error:
            return errno.errorcode[error.errno or 0]
    return "taken"


def make_process_group_itself() -> list[float]:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=LIMIT)
    return all_reduce()


def wait_forever() -> None:
    time.sleep(1000)


def wait_for_a_worker() -> None:
    worker = multiprocessing.get_context("fork").Process(target=wait_forever, daemon=True)
    worker.start()
    worker.join()


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def end_on_sigterm(started: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (started / os.environ["RANK"]).touch()
    time.sleep(1000)


def leave_things_to_the_end(folder: Path) -> None:
    def note(what: str) -> None:
        (folder / f"{what} {os.environ['RANK']}").touch()

    def thread() -> None:
        time.sleep(0.2)
        note("thread")

    atexit.register(note, "atexit")
    threading.Thread(target=thread).start()


def draw() -> tuple[float, float]:
    import random

    import numpy as np

    return random.random(), float(np.random.random())


def save_together(times: int = 1) -> list[Any]:
    ranks = Ranks.detect(LIMIT)
    done = [ranks.agree("save", lambda: ranks.rank) for _ in range(times)]
    ranks.close()
    return done


def save_with_a_short_limit() -> Any:
    ranks = Ranks.detect(timedelta(seconds=1))
    begun = time.monotonic()
    try:
        return ranks.agree("save")
    except Exception as error:  # noqa: BLE001 - the test inspects it
        return str(error), time.monotonic() - begun


def named_point() -> float:
    begun = time.monotonic()
    reached("step 1")
    reached("step 2")
    return time.monotonic() - begun


def write_file(folder: Path, size: int) -> float:
    """Write a file through this rank's disk, as the engine does. Returns the seconds that it took."""
    own = disk()
    begun = time.monotonic()
    path = folder / os.environ["RANK"]
    file = own.create(path, size)
    try:
        for offset in range(0, size, 65536):
            own.write(file, memoryview(bytearray(65536)), offset)
    finally:
        own.close(file)
    return time.monotonic() - begun


def lose_the_store() -> str:
    """Rank 0 serves the store and dies; the others wait for it, in two threads each."""
    ranks = Ranks.detect(timedelta(minutes=5))
    ranks.agree("all are here")
    begun = time.monotonic()
    messages = []

    def work(name: str) -> None:
        try:
            ranks.agree(name, lambda: time.sleep({"stop": 0.5, "save": 60}[name] if ranks.rank == 0 else 0))
        except StoreLost as error:
            messages.append(str(error))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("save", "stop")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun < 20
    assert len(messages) == 2
    return messages[0]


def detect_twice() -> Any:
    first, second = Ranks.detect(LIMIT), Ranks.detect(LIMIT)
    got = [first.agree("work", lambda: 1), second.agree("work", lambda: 2), first.agree("work", lambda: 3)]
    second.close()
    first.close()
    return first.rank, got


def detect_or_explain() -> Any:
    try:
        return Ranks.detect(LIMIT).world_size
    except Exception as error:  # noqa: BLE001 - the test inspects it
        return type(error).__name__, str(error)


A_RUN = """
import sys
from pathlib import Path
from reprieve.testing import run_ranks
from tests.support.jobs.rank_jobs import end_on_sigterm
run_ranks(2, end_on_sigterm, Path(sys.argv[1]), store='folder', backend=None)
"""
