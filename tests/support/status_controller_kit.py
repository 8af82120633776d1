"""The status controller on an API server in memory, with pods of rank 0 that are HTTP servers on the loopback.

with JobServer(tmp_path) as cluster, PodServer() as pod:
    cluster.add_job(); cluster.add_pod(pod)
    with controlling(cluster) as controller:
        cluster.wait_for(lambda: cluster.progress().get("step") == 150)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.jobs.pods import PORT_VARIABLE
from reprieve.operator.controller import pod_request
from reprieve.operator.controller.controller import StatusController
from reprieve.operator.metrics.counters import Counters
from reprieve.operator.status.objects import ObservedPod
from tests.support.kubernetes_server import KubernetesServer
from tests.support.operator_kit import answer, pod_object, stamp, train_job_object

Object = dict[str, Any]
WITHIN_S = 30.0
OWN_MANAGER = "reprieve.dev/operator"


class PodServer:
    """A program in a pod that answers each connection with the same bytes, whatever they are."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content or fresh_answer()
        self.requests: list[bytes] = []
        self.holds = False
        """It never ends its answer."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._open: list[socket.socket] = []

    def __enter__(self) -> PodServer:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._socket, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def report(self, **changes: Any) -> None:
        self.content = fresh_answer(**changes)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            request, content = connection.recv(4096), self.content
            self.requests.append(request)  # one that is counted does not answer with what is reported later
            connection.sendall(content)
        if self.holds:
            self._open.append(connection)
        else:
            connection.close()


def fresh_answer(**changes: Any) -> bytes:
    """Progress that was updated now."""
    return http_answer(answer(**{"lastUpdateTime": stamp(now()), **changes}))


def http_answer(content: Any, *, status: str = "200 OK", headers: str = "") -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return f"HTTP/1.0 {status}\r\n{headers}\r\n".encode() + body


class JobServer(KubernetesServer):
    """An API server with TrainJobs and their pods in the namespace `team`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pods = 0

    def add_job(self, name: str = "train", **changes: Any) -> None:
        self.put("trainjobs", train_job_object(name, **changes))

    def add_pod(self, server: PodServer | None, *, job: str = "train", owner: str | None = None, **changes: Any) -> str:
        """Add a running pod of rank 0; None: nobody listens on its port. Return its name."""
        self._pods += 1
        pod = pod_object(f"{job}-node-0-0-{self._pods}", job=job, **{"created": now(), **changes})
        if owner is not None:
            pod["metadata"]["ownerReferences"][0]["name"] = owner
        port = server.port if server is not None else _free_port()
        pod["spec"]["containers"][0]["env"] = [{"name": PORT_VARIABLE, "value": str(port)}]
        pod["spec"]["nodeName"] = "node-0"
        running = {"name": "node", "state": {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}}
        pod["status"] = {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [running]}
        self.put("pods", pod)
        return str(pod["metadata"]["name"])

    def end_pod(self, name: str, exit_code: int, message: str = "") -> None:
        pod = self.get("pods", name, "team")
        ended = {"exitCode": exit_code, "reason": "Error", "message": message, "finishedAt": stamp(now())}
        pod["status"] |= {
            "phase": "Failed",
            "containerStatuses": [{"name": "node", "state": {"terminated": ended}}],
        }
        self.put("pods", pod)

    def job(self, name: str = "train") -> Object:
        return self.get("trainjobs", name, "team")

    def progress(self, name: str = "train") -> Object:
        return dict(self.job(name).get("status", {}).get("trainingProgress", {}))

    def events(self) -> list[str]:
        """The reasons of all Events, in their order."""
        return [each["reason"] for (plural, _, _), each in list(self.objects.items()) if plural == "events"]

    def writes(self) -> list[str]:
        return [each for each in self.requests if not each.startswith("GET")]

    def wait_for(self, condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, [self.job(), self.events(), self.requests[-20:]]
            time.sleep(0.02)


@contextlib.contextmanager
def controlling(
    *, ask: Callable[[ObservedPod, str], Awaitable[bytes]] | None = None
) -> Iterator[tuple[StatusController, Counters]]:
    """Run a controller in a thread, until the block ends. It must not have ended by itself."""
    counters, started, failures = Counters(), threading.Event(), []
    held: dict[str, Any] = {}

    async def run() -> None:
        async with KubernetesApi(field_manager=OWN_MANAGER) as api:
            held["controller"] = StatusController(api, ask or _ask, counters)
            held["loop"], held["task"] = asyncio.get_running_loop(), asyncio.ensure_future(held["controller"].run())
            started.set()
            with contextlib.suppress(asyncio.CancelledError):
                await held["task"]

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - the thread of the test raises it
            failures.append(error)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert started.wait(WITHIN_S)
    try:
        yield held["controller"], counters
    finally:
        with contextlib.suppress(RuntimeError):
            held["loop"].call_soon_threadsafe(held["task"].cancel)
        thread.join(WITHIN_S)
        assert not thread.is_alive()
        if failures:
            raise failures[0]


async def _ask(pod: ObservedPod, path: str) -> bytes:
    assert pod.port is not None
    return await pod_request.get(pod.address, pod.port, path, timeout_s=1.0)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def now() -> datetime:
    return datetime.now(timezone.utc)
