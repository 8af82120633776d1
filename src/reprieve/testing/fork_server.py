"""A process that has imported torch once, and forks a child for each rank of each test.

Importing torch takes 2 to 8 seconds on a small machine, a fork 10 ms. The server has one thread and
never makes a process group, a store or a tensor, so what it forks is as good as new. It ends with the process that
started it (its socket closes), and its children end with it (PR_SET_PDEATHSIG).

The talk over the socket: "start FILE" is answered by a pid, with a pidfd to watch and to signal it by; "reap PID" by
the wait status of a child that has ended.
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
    """The parent's side."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        """`modules`: imported before all forks."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = _PROGRAM.format(path=sys.path, fd=theirs.fileno(), modules=tuple(modules))
        # As torchrun does: ranks that share a machine would otherwise start a thread a core each.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
            [sys.executable, "-c", program], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
        )
        theirs.close()
        self._lock = threading.Lock()

    def start(self, task_file: Path) -> tuple[int, int]:
        """A child that runs this task; its pid and a pidfd."""
        with self._lock:
            self._socket.send(f"start {task_file}".encode())
            answer, fds, _, _ = socket.recv_fds(self._socket, 64, 1)
        if not answer:
            raise RuntimeError("the process that forks ranks has died")
        return int(answer), fds[0]

    def reap(self, pid: int) -> int:
        """The wait status of a child that has ended."""
        with self._lock:
            self._socket.send(f"reap {pid}".encode())
            answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the process that forks ranks has died")
        return int(answer)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_servers: dict[tuple[int, tuple[str, ...]], ForkServer] = {}
"""By the process that talks to them (after a fork of the test process itself they are not its own) and by what they
have imported."""
_servers_lock = threading.Lock()


def fork_server(modules: Sequence[str] = ()) -> ForkServer:
    """The one of this process that has imported these modules, started when first asked for."""
    key = os.getpid(), tuple(modules)
    with _servers_lock:
        server = _servers.get(key)
        if server is None or not server.alive:
            server = _servers[key] = ForkServer(modules)
            atexit.register(server.close)
        return server


def main(fd: int, modules: Sequence[str]) -> None:
    """The server's side. Forks return from `_serve` with something to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, which then closes the socket
    # Imported for the children. Whoever makes an optimizer, or DDP, imports dynamo: 2 to 4 s of CPU in each rank.
    import torch._dynamo  # noqa: F401

    import reprieve.checkpoint.checkpointer
    import reprieve.ranks.torch_store  # noqa: F401
    from reprieve.testing import rank_process

    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would touch, and so copy, all that was imported
    with socket.socket(fileno=fd) as parent:
        task_file = _serve(parent)
    if task_file is not None:
        rank_process.run(task_file)


def _serve(parent: socket.socket) -> str | None:
    """The task, in a child; None in the server, when its parent has gone."""
    while message := parent.recv(4096):
        verb, _, what = message.decode().partition(" ")
        if verb == "start":
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                _end_with(server)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return what
            pidfd = os.pidfd_open(pid)
            socket.send_fds(parent, [str(pid).encode()], [pidfd])
            os.close(pidfd)
        else:
            parent.send(str(os.waitpid(int(what), 0)[1]).encode())
    return None


def _end_with(server: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it died before the line above
        os._exit(1)
