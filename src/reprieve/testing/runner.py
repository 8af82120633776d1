"""`run_ranks`: runs the same function in n real processes, as torchrun would, and injects faults."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from reprieve.errors import ConfigError
from reprieve.testing.faults import Fault
from reprieve.testing.fork_server import ForkServer, fork_server
from reprieve.testing.rank_process import Task
from reprieve.testing.result import Result
from reprieve.units import parse_duration

if TYPE_CHECKING:
    from reprieve.ranks.torch_store import TorchStore

STACK_DUMP_TIMEOUT_S = 2.0
"""How long a rank that timed out may take to write the stacks of its threads."""


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    store: str = "tcp",
    backend: str | None = "gloo",
    faults: Iterable[Fault] = (),
    timeout: str | float | timedelta = "60s",
    env: Mapping[str, str | None] | None = None,
    store_host: int | None = None,
    group_timeout: str | float | timedelta = "30s",
    modules: Sequence[str] = (),
) -> list[Result]:
    """Run `fn(*args)` in `n` processes. Returns their results, by rank.

    `fn`: a function at the top level of an importable module, or of the script itself.
    `store`: the kind of store that `REPRIEVE_STORE` names in the ranks: "tcp" (torch's store) or "folder".
    `backend`: initialises torch.distributed with it before calling `fn`; None does not initialise it.
    `faults`: what happens to which rank: `kill`, `terminate`, `pause`, `fail`, `slow_disk`, `full_disk`.
    `timeout`: a rank that takes longer is killed, and its result has `timed_out` set.
    `env`: changes to this process's environment; None removes a variable.
    `store_host`: the rank that serves the store; by default this process serves it, as torchrun's agent would.
    `group_timeout`: how long a collective of the process group waits for a dead rank.
    `modules`: what the function needs and takes long to import. All calls with the same modules import them once.
    """
    with start_ranks(
        n,
        fn,
        *args,
        store=store,
        backend=backend,
        faults=faults,
        timeout=timeout,
        env=env,
        store_host=store_host,
        group_timeout=group_timeout,
        modules=modules,
    ) as ranks:
        return ranks.wait()


def start_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    store: str = "tcp",
    backend: str | None = "gloo",
    faults: Iterable[Fault] = (),
    timeout: str | float | timedelta = "60s",
    env: Mapping[str, str | None] | None = None,
    store_host: int | None = None,
    group_timeout: str | float | timedelta = "30s",
    modules: Sequence[str] = (),
) -> RunningRanks:
    """Start ranks as `run_ranks` does, for tests that act on them while they run.

    with start_ranks(3, train) as ranks:
        ranks.signal(1, signal.SIGTERM)
        results = ranks.wait()
    """
    if store not in ("tcp", "folder"):
        raise ConfigError(f"store={store!r}: use 'tcp' or 'folder'")
    if store_host is not None and store != "tcp":
        raise ConfigError("only a 'tcp' store has a host")
    call = pickle.dumps((fn, args))
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    served = []
    reserved = _reserve_port()
    try:
        environment = {**os.environ, **_environment(n, reserved.getsockname()[1])}
        environment.pop("REPRIEVE_STORE", None)
        if store == "folder":
            environment["REPRIEVE_STORE"] = f"file://{folder}/keys"
        elif store_host is None:
            served.append(_serve())
            environment["REPRIEVE_STORE"] = f"tcp://127.0.0.1:{served[-1].port}"
        group = _serve() if backend is not None else None
        served += [group] if group is not None else []
        tasks = [
            Task(
                rank=rank,
                world_size=n,
                folder=folder,
                environment=_merged({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, env or {}),
                search_path=list(sys.path),
                working_folder=str(Path.cwd()),
                main=_main_script() if fn.__module__ == "__main__" else None,
                call=call,
                faults=list(faults),
                store_host=store_host,
                backend=backend,
                group_port=group.port if group is not None else None,
                group_limit=parse_duration(group_timeout),
            )
            for rank in range(n)
        ]
        return RunningRanks(tasks, parse_duration(timeout), folder, served, reserved, fork_server(modules))
    except BaseException:
        reserved.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise


class RunningRanks:
    """The processes of `start_ranks`. They end with the `with` block at the latest."""

    def __init__(
        self,
        tasks: list[Task],
        timeout: timedelta,
        folder: Path,
        served: list[TorchStore],
        reserved: socket.socket,
        server: ForkServer,
    ) -> None:
        self._folder = folder
        self._served = served
        self._reserved = reserved
        self._server = server
        self._ranks: list[_Rank] = []
        try:
            for task in tasks:
                task.file("task").write_bytes(pickle.dumps(task))
                self._ranks.append(_Rank(task, *self._server.start(task.file("task"))))
        except BaseException:
            self.close()
            raise
        self._deadline = time.monotonic() + timeout.total_seconds()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, if it is still running."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ranks[rank].pidfd, number)

    def wait(self) -> list[Result]:
        """Wait until all ranks have ended, or kill them at the timeout. Returns their results."""
        self._wait_until(self._deadline)
        timed_out = [rank for rank in self._ranks if rank.status is None]
        children = [pidfd for rank in timed_out for pidfd in _children_of(rank.pid)]
        for rank in timed_out:
            rank.timed_out = True
            self.signal(rank.task.rank, signal.SIGABRT)
        self._wait_until(time.monotonic() + STACK_DUMP_TIMEOUT_S)
        for pidfd in children:
            _abort(pidfd)
        self._kill()
        return [rank.result() for rank in self._ranks]

    def close(self) -> None:
        self._kill()
        for rank in self._ranks:
            rank.close()
        for store in self._served:
            store.close()
        self._reserved.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RunningRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.status is None:
                self.signal(rank.task.rank, signal.SIGKILL)
        self._wait_until(None)

    def _wait_until(self, deadline: float | None) -> None:
        """Wait until all ranks have ended, or the deadline has passed."""
        poll = select.poll()
        running = {rank.pidfd: rank for rank in self._ranks if rank.status is None}
        for pidfd in running:
            poll.register(pidfd, select.POLLIN)
        while running:
            remaining_s = None if deadline is None else deadline - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                return
            for pidfd, _ in poll.poll(None if remaining_s is None else remaining_s * 1000 + 1):
                rank = running.pop(pidfd)
                rank.ended = time.monotonic()
                rank.status = self._server.reap(rank.pid)
                rank.task.file("ended").touch()
                poll.unregister(pidfd)


class _Rank:
    """The process of one rank."""

    def __init__(self, task: Task, pid: int, pidfd: int) -> None:
        self.task = task
        self.pid = pid
        self.pidfd = pidfd
        self.started = self.ended = time.monotonic()
        self.status: int | None = None
        self.timed_out = False

    def result(self) -> Result:
        assert self.status is not None
        code = os.waitstatus_to_exitcode(self.status)
        value, error = None, None
        with contextlib.suppress(FileNotFoundError):
            value, error = pickle.loads(self.task.file("result").read_bytes())  # noqa: S301 - written by our own child
        return Result(
            rank=self.task.rank,
            value=value,
            error=error,
            exit_code=code if code >= 0 else None,
            signal=signal.Signals(-code) if code < 0 else None,
            timed_out=self.timed_out,
            seconds=self.ended - self.started,
            output=self._output(),
        )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.pidfd)

    def _output(self) -> str:
        try:
            lines = self.task.file("output").read_text(errors="replace").splitlines(keepends=True)
        except FileNotFoundError:
            return ""
        # faulthandler lists dozens of names with the stacks of each rank.
        return "".join(line for line in lines if not line.startswith("Extension modules:"))


def _children_of(pid: int) -> list[int]:
    """Return pidfds of the processes that a rank's main thread started: a rank may hang because its DataLoader worker
    does."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # not all kernels are built with this file
        return []
    pidfds = []
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(int(child)))
    return pidfds


def _abort(pidfd: int) -> None:
    """Have a process write its stacks. One at a time: processes write them character by character, into the file of
    their rank."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGABRT)
        poll.poll(STACK_DUMP_TIMEOUT_S * 1000)
    os.close(pidfd)


def _serve() -> TorchStore:
    from reprieve.ranks.torch_store import TorchStore

    return TorchStore.serve()


def _reserve_port() -> socket.socket:
    """Return a socket that keeps its port free for a process group of the function, while it is open.

    The kernel gives the port to nobody who does not name it. A store can listen there nevertheless: on Linux, sockets
    with SO_REUSEADDR share a port while none of the others listens.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _environment(world_size: int, port: int) -> dict[str, str]:
    """Return the environment that a launcher sets on one host."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as torchrun does
    }


def _merged(environment: dict[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**environment, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _main_script() -> str | None:
    return getattr(sys.modules["__main__"], "__file__", None)
