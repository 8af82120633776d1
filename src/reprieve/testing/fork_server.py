"""A process that has imported torch once, and forks a child for each rank of each test.

Importing torch takes 2 to 8 seconds on a small machine, a fork 10 ms. The server has one thread and never makes a
process group, a store or a tensor, so its children are as good as new processes. It ends with the process that started
it (its socket closes), and its children end with it (PR_SET_PDEATHSIG).

The protocol on the socket: the answer to "start FILE" is a PID, with a pidfd to watch and signal the child; the answer
to "reap PID" is the wait status of a child that has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1

_PROGRAM = """
import sys
sys.path[:] = {path!r}
from reprieve.testing import fork_server
fork_server.main({fd}, {modules!r})
"""


class ForkServer:
    """The test process's side of the socket."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        """`modules`: what to import before all forks."""
        self._socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = _PROGRAM.format(path=sys.path, fd=server_socket.fileno(), modules=tuple(modules))
        # As torchrun does: otherwise each rank would start a thread for each core of the shared machine.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
            [sys.executable, "-c", program],
            pass_fds=[server_socket.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        server_socket.close()
        self._lock = threading.Lock()

    def start(self, task_file: Path) -> tuple[int, int]:
        """Fork a child that runs this task. Returns its PID and a pidfd."""
        with self._lock:
            self._socket.send(f"start {task_file}".encode())
            answer, fds, _, _ = socket.recv_fds(self._socket, 64, 1)
        if not answer:
            raise RuntimeError("the process that forks ranks has died")
        return int(answer), fds[0]

    def reap(self, pid: int) -> int:
        """Return the wait status of a child that has ended."""
        with self._lock:
            self._socket.send(f"reap {pid}".encode())
            answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the process that forks ranks has died")
        return int(answer)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_servers: dict[tuple[int, tuple[str, ...]], ForkServer] = {}
"""By the process that uses them (a fork of the test process must not use its parent's) and by what they have
imported."""
_servers_lock = threading.Lock()


def fork_server(modules: Sequence[str] = ()) -> ForkServer:
    """Return the server of this process that has imported these modules; start it at the first call."""
    key = os.getpid(), tuple(modules)
    with _servers_lock:
        server = _servers.get(key)
        if server is None or not server.is_running:
            server = _servers[key] = ForkServer(modules)
            atexit.register(server.close)
        return server


def main(fd: int, modules: Sequence[str]) -> None:
    """Run the server. In forked children, `_serve` returns a task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, which then closes the socket
    gc.disable()  # collections take a third of the time of large imports, and find nothing
    # Imported for the children. Making an optimizer or DDP imports dynamo: 2 to 4 s of CPU time in each rank.
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.profiler  # noqa: F401

    import reprieve.adapters.loop.run
    import reprieve.checkpoint.checkpointer
    import reprieve.ranks.torch_store  # noqa: F401
    from reprieve.testing import rank_process
    from reprieve.testing.huge_pages import use_huge_pages

    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would touch, and so copy, all imported pages
    gc.enable()
    use_huge_pages()
    with socket.socket(fileno=fd) as parent:
        task_file = _serve(parent)
    if task_file is not None:
        rank_process.run(task_file)


def _serve(parent: socket.socket) -> str | None:
    """Serve requests. Returns the task file in a child, and None in the server when its parent is gone."""
    while message := parent.recv(4096):
        verb, _, argument = message.decode().partition(" ")
        if verb == "start":
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                _end_with(server)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return argument
            pidfd = os.pidfd_open(pid)
            socket.send_fds(parent, [str(pid).encode()], [pidfd])
            os.close(pidfd)
        else:
            parent.send(str(os.waitpid(int(argument), 0)[1]).encode())
    return None


def _end_with(server: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # the server died before the line above
        os._exit(1)
