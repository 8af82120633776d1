"""One rank of a test: reads what to do from a file, does it, leaves what came of it in another.

Runs in a process that was forked for it (see `fork_server`).
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

from reprieve import failpoints
from reprieve.console import fallback
from reprieve.storage.disk import Disk
from reprieve.testing.faults import Fault, FullDiskFault, SlowDiskFault, at_points
from reprieve.testing.faulty_disks import FullDisk, SlowDisk
from reprieve.testing.result import Failure


@dataclass(frozen=True, slots=True)
class Task:
    """Everything a rank needs to know."""

    rank: int
    world_size: int
    folder: Path
    """Of this run; each rank has its own file names in it."""
    environment: Mapping[str, str]
    search_path: Sequence[str]
    working_folder: str
    main: str | None
    """The script that the function is in, where it is in one."""
    call: bytes
    """The function and its arguments, pickled."""
    faults: Sequence[Fault]
    store_host: int | None
    """The rank that serves the store; None where the parent has one for us."""
    backend: str | None
    group_port: int | None
    """Of the store through which the process group is made."""
    group_limit: timedelta

    def file(self, kind: str) -> Path:
        return self.folder / f"{self.rank}.{kind}"


_faults: Sequence[Fault] = ()


def disk() -> Disk:
    """The disk of this rank under the faults of the scenario, to be given to `Checkpointer(disk=…)`."""
    for fault in _faults:
        if isinstance(fault, SlowDiskFault):
            return SlowDisk(fault.bytes_per_second)
        if isinstance(fault, FullDiskFault):
            return FullDisk(fault.after_bytes)
    return Disk()


def run(task_file: str) -> NoReturn:
    """Do it, and end as a script would: other threads joined, atexit handlers run, the exit code told."""
    code = _run(task_file)
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    # Not through the interpreter's own end: to take down all of torch takes 2 s in a fork, whose pages it copies.
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
    _as_if_fresh()
    fallback.shows_every_rank = True
    _faults = [fault for fault in task.faults if fault.rank == task.rank]
    if _faults:
        failpoints.on_reached = at_points(_faults)
    code: int | str | None = 0
    try:
        function, arguments = _what(task)
        with _store(task), _process_group(task):
            value = function(*arguments)
        outcome = pickle.dumps((value, None))
    except BaseException as error:  # noqa: BLE001 - reported, and turned into an exit code
        traceback.print_exc()
        failure = Failure(type(error).__name__, str(error), traceback.format_exc())
        outcome = pickle.dumps((None, failure))
        code = error.code if isinstance(error, SystemExit) else 1
    fresh = task.file("result.new")
    fresh.write_bytes(outcome)
    fresh.rename(task.file("result"))
    return code


def _redirect(output: Path) -> None:
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(nothing)
    os.close(target)
    # A rank whose time is up gets SIGABRT first, so that the test can show where it hung.
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _as_if_fresh() -> None:
    """Undo what all forks have in common and separate processes would not. (Python's own generator sees to itself.)"""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _what(task: Task) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if task.main is not None:
        sys.modules["__main__"].__dict__.update(runpy.run_path(task.main, run_name="__mp_main__"))
    function, arguments = pickle.loads(task.call)  # noqa: S301 - written by the test itself
    return function, arguments


@contextlib.contextmanager
def _store(task: Task) -> Any:
    """A rank that serves the store says where in a file, for which the others wait."""
    if task.store_host is None:
        yield
        return
    address = task.folder / "store"
    if task.rank == task.store_host:
        from reprieve.ranks.torch_store import TorchStore

        served = TorchStore.serve()
        fresh = task.folder / "store.new"
        fresh.write_text(f"tcp://127.0.0.1:{served.port}")
        fresh.rename(address)
    while not address.exists():  # no limit: the parent has one
        time.sleep(0.005)
    os.environ["REPRIEVE_STORE"] = address.read_text()
    yield
    if task.rank == task.store_host:  # the others may still read what they agreed on
        while not all((task.folder / f"{rank}.ended").exists() for rank in range(task.world_size) if rank != task.rank):
            time.sleep(0.005)


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
    # It ends with the process: to destroy it would hang, in torch 2.6, where another rank has already left.
    yield
