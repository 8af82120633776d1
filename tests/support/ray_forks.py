"""Forks the worker processes of a test's Ray cluster from a process that has imported torch.

A worker's start costs 4 to 6 s of CPU time, nearly all for imports, and a test of stops starts many. Ray's node manager
runs `python …/setup_worker.py` for each. `sitecustomize` turns that process into a client: it passes its arguments,
environment and output on to the server, and lives as long as the fork. Ray notices nothing: it knows a worker by the
process id that the worker registers with. `REPRIEVE_RAY_FORKS=0` starts all workers as Ray does.

The server does not import Ray itself, whose library reads its environment when it is loaded: 0.7 s in each fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ADDRESS = "TESTS_RAY_FORKS"
"""The environment variable with the path of the server's socket."""
_MODULES = (
    "click",
    "colorama",
    "dill",
    "fsspec.implementations.local",
    "google.protobuf.json_format",
    "jsonschema",
    "pandas",
    "pyarrow.fs",
    "pydantic",
    "reprieve.adapters.loop.run",
    "reprieve.adapters.transformers.training",
    "reprieve.checkpoint.checkpointer",
    "requests",
    "starlette.requests",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.utils.tensorboard",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
)


def start_server(folder: Path) -> subprocess.Popen[bytes]:
    """Start the server, and tell all processes that this one starts where it is."""
    os.environ[ADDRESS] = str(folder / "forks")
    with (folder / "forks.log").open("wb") as log:
        # The pipe to its stdin closes when this process ends, whatever ends it.
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_forks", os.environ[ADDRESS]],
            env={**os.environ, "JE_ARROW_MALLOC_CONF": "background_thread:false"},  # a fork takes only one thread along
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    end = time.monotonic() + 300  # in a new environment, Python compiles all of it first
    while not Path(os.environ[ADDRESS]).exists():
        assert server.poll() is None and time.monotonic() < end, (folder / "forks.log").read_text(errors="replace")
        time.sleep(0.05)
    return server


def become_client() -> None:
    """Let the server do what this process was started for. Returns where it cannot."""
    arguments = sys.orig_argv[2:]
    options = [each for each in arguments if each.startswith("--")]
    context = next((each.partition("=")[2] for each in options if each.startswith("--serialized-runtime-env-")), "{}")
    settings = json.loads(context)
    if any(settings.get(name) for name in ("command_prefix", "override_worker_entrypoint")):
        return
    if settings.get("py_executable", sys.executable) != sys.executable:
        return
    worker = [each for each in arguments if not each.startswith(("--serialized-runtime-env-", "--language"))]
    if not worker[0].endswith("/default_worker.py"):
        return
    request = {"arguments": worker, "environment": {**os.environ, **(settings.get("env_vars") or {})}}
    try:
        server = socket.socket(socket.AF_UNIX)
        server.connect(os.environ[ADDRESS])
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        server.shutdown(socket.SHUT_WR)
        code = server.recv(16)
    except OSError:
        return
    os._exit(int(code or b"1"))


def main(path: str) -> None:
    """Serve forks until the process that started this one closes its stdin."""
    import gc
    import importlib
    import threading

    gc.disable()
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # other versions have other modules
            if error.name is None or not name.startswith(error.name):
                raise
    from reprieve.testing.huge_pages import use_huge_pages

    gc.freeze()
    gc.enable()
    use_huge_pages()
    assert threading.active_count() == 1, threading.enumerate()
    request = _serve(path)
    if request is not None:
        _run(request)


def _serve(path: str) -> dict[str, object] | None:
    """Fork a child for each request. Returns the request in a child, and None in the server at its end."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path + ".new")
    server.listen(64)
    os.rename(path + ".new", path)
    events = selectors.DefaultSelector()
    events.register(server, selectors.EVENT_READ)
    events.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj == 0:
                return None
            if key.fileobj is server:
                client, _ = server.accept()
                if (request := _receive(client)) is None:
                    continue
                message, fds = request
                if (pid := os.fork()) == 0:
                    for number, fd in enumerate(fds):
                        os.dup2(fd, number)
                        os.close(fd)
                    for sock in (server, client, *(each.data[1] for each in events.get_map().values() if each.data)):
                        sock.close()
                    for pidfd in (each.fd for each in events.get_map().values() if each.data):
                        os.close(pidfd)
                    events.close()
                    return message
                for fd in fds:
                    os.close(fd)
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, client))
            else:
                pid, client = key.data
                events.unregister(key.fileobj)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):  # the node manager has ended it
                    client.sendall(str(code if code >= 0 else 128 - code).encode())
                client.close()


def _receive(client: socket.socket) -> tuple[dict[str, object], list[int]] | None:
    data, fds, _, _ = socket.recv_fds(client, 1 << 20, 3)
    while part := client.recv(1 << 20):
        data += part
    return (json.loads(data), fds) if data else None


def _run(request: dict[str, object]) -> None:
    """Run Ray's worker script, as a process of its own would."""
    import runpy

    import numpy

    os.setpgid(0, 0)  # the node manager ends the process group of a worker that has died
    numpy.random.seed()
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    sys.argv = [str(each) for each in request["arguments"]]  # type: ignore[attr-defined]
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1])
