"""One rank of a test: reads a task from a file, runs it, and writes the result to another file.

It runs in a process that `fork_server` forked for it; `runner` writes the task and reads the result.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import resource
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from reprieve.console import fallback
from reprieve.ranks import failpoints
from reprieve.storage.disk import Disk
from reprieve.testing.faults import Fault, FullDiskFault, SlowDiskFault, at_points
from reprieve.testing.faulty_disks import FullDisk, SlowDisk
from reprieve.testing.result import Failure


@dataclass(frozen=True, slots=True)
class Task:
    """What one rank runs, and its surroundings."""

    rank: int
    world_size: int
    folder: Path
    """The folder of this run; each rank has its own file names in it."""
    environment: Mapping[str, str]
    search_path: Sequence[str]
    working_folder: str
    main: str | None
    """The script that defines the function. None: a module does."""
    call: bytes
    """The function and its arguments, pickled."""
    faults: Sequence[Fault]
    store_host: int | None
    """The rank that serves the store; None: the test process serves it."""
    backend: str | None
    group_port: int | None
    """The port of the store with which the process group is made."""
    group_limit: timedelta

    def file(self, kind: str) -> Path:
        return self.folder / f"{self.rank}.{kind}"


POLL_INTERVAL_S = 0.005

_faults: Sequence[Fault] = ()
"""The faults of this process, which is one rank."""


def disk() -> Disk:
    """Return the disk of this rank with the faults of the scenario, for `Checkpointer(disk=…)`."""
    for fault in _faults:
        if isinstance(fault, SlowDiskFault):
            return SlowDisk(fault.bytes_per_second)
        if isinstance(fault, FullDiskFault):
            return FullDisk(fault.after_bytes)
    return Disk()


def run(task_file: str) -> NoReturn:
    """Run the task and exit as a script would: join other threads, run atexit handlers, return the exit code."""
    code = _run(task_file)
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    # Skip the interpreter's own shutdown: taking down torch needs 2 s in a fork, because it copies pages.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def _run(task_file: str) -> int | str | None:
    global _faults  # noqa: PLW0603 - a process is one rank
    task: Task = pickle.loads(Path(task_file).read_bytes())  # noqa: S301 - written by the test itself
    _redirect(task.file("output"))
    os.chdir(task.working_folder)
    os.environ.clear()
    os.environ.update(task.environment)
    sys.path[:] = task.search_path
    _reseed_numpy()
    fallback.shows_every_rank = True
    _faults = [fault for fault in task.faults if fault.rank == task.rank]
    if _faults:
        failpoints.on_reached = at_points(_faults)
    code: int | str | None = 0
    try:
        function, arguments = _function(task)
        with _store(task), _process_group(task):
            value = function(*arguments)
        outcome = pickle.dumps((value, None))
    except BaseException as error:  # noqa: BLE001 - reported, and turned into an exit code
        traceback.print_exc()
        failure = Failure(type(error).__name__, str(error), traceback.format_exc())
        outcome = pickle.dumps((None, failure))
        code = error.code if isinstance(error, SystemExit) else 1
    new_file = task.file("result.new")
    new_file.write_bytes(outcome)
    new_file.rename(task.file("result"))
    return code


def _redirect(output: Path) -> None:
    output_fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(null_fd)
    os.close(output_fd)
    # A rank that times out gets SIGABRT first, so that its output shows where it hung.
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _reseed_numpy() -> None:
    """Give each fork its own random numbers, as separate processes have. (Python reseeds its own generator.)"""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _function(task: Task) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if task.main is not None:
        sys.modules["__main__"].__dict__.update(runpy.run_path(task.main, run_name="__mp_main__"))
    function, arguments = pickle.loads(task.call)  # noqa: S301 - written by the test itself
    return function, arguments


@contextlib.contextmanager
def _store(task: Task) -> Any:
    """Set REPRIEVE_STORE. A rank that serves the store writes its address to a file, and the others wait for it."""
    if task.store_host is None:
        yield
        return
    address = task.folder / "store"
    if task.rank == task.store_host:
        from reprieve.ranks.torch_store import TorchStore

        served = TorchStore.serve()
        new_file = task.folder / "store.new"
        new_file.write_text(f"tcp://127.0.0.1:{served.port}")
        new_file.rename(address)
    while not address.exists():  # no limit: the test process has one
        time.sleep(POLL_INTERVAL_S)
    os.environ["REPRIEVE_STORE"] = address.read_text()
    yield
    if task.rank == task.store_host:  # the others may still read the last outcome
        while not all((task.folder / f"{rank}.ended").exists() for rank in range(task.world_size) if rank != task.rank):
            time.sleep(POLL_INTERVAL_S)


@contextlib.contextmanager
def _process_group(task: Task) -> Any:
    if task.backend is None or task.group_port is None:
        yield
        return
    import torch.distributed as dist

    # Untyped: torch does not export its stores by name.
    torch_distributed: Any = dist
    store = torch_distributed.TCPStore("127.0.0.1", task.group_port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        task.backend,
        store=torch_distributed.PrefixStore("process group", store),
        rank=task.rank,
        world_size=task.world_size,
        timeout=task.group_limit,
    )
    # The group ends with the process: in torch 2.6, destroying it hangs if another rank has already left.
    yield
