"""The time of an admission at the webhook: from the request to the answer, over TLS, with the runtime read each time.

The server is the operator's own; the API server that it reads the runtime from is one in memory, in another process, so
that a read costs a round trip but no etcd. One connection sends all reviews, as an API server does.

python -m benchmarks --only admission
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import multiprocessing
import os
import ssl
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from typing import Any

from reprieve.kubernetes.api import KubernetesApi
from reprieve.operator.certificates import make_pair
from reprieve.operator.serving_context import ServingContext
from reprieve.operator.webhook_server import WebhookServer, runtime_reader

REVIEWS = 2000
WARM_UP = 100
PROMISED_P99_MS = 20
RUNTIME: dict[str, Any] = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch", "resourceVersion": "1"},
    "spec": {"template": {"spec": {"replicatedJobs": [{"name": "node"}]}}},
}
JOB: dict[str, Any] = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {"name": "job", "namespace": "team"},
    "spec": {
        "runtimeRef": {"name": "torch"},
        "trainer": {"command": ["python", "train.py"], "env": [{"name": f"V{n}", "value": "x"} for n in range(20)]},
        "checkpointing": {
            "interval": "5m",
            "storage": {"uri": "/mnt/kubeflow-checkpoints/run", "persistentVolume": {"claimName": "claim"}},
        },
    },
}


def figures() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, _api_server(Path(folder)):
        seconds = asyncio.run(_times())
    percent = quantiles(seconds, n=100)
    return {
        "admission.p50_ms": round(percent[49] * 1000, 2),
        "admission.p99_ms": round(percent[98] * 1000, 2),
    }


def show(found: dict[str, float]) -> None:
    print(
        f"admission of {REVIEWS} TrainJobs: p50 {found['admission.p50_ms']:.1f} ms, "
        f"p99 {found['admission.p99_ms']:.1f} ms (promised: {PROMISED_P99_MS} ms)"
    )


async def _times() -> list[float]:
    pair = make_pair(["localhost"], datetime.now(timezone.utc))
    serving = ServingContext()
    serving.load(pair.certificate, pair.key)
    async with KubernetesApi() as api:
        server = WebhookServer(runtime_reader(api), serving, missing=str, address=("localhost", 0))
        task = asyncio.create_task(server.run())
        try:
            return await asyncio.to_thread(_measure, server.port, pair.certificate)
        finally:
            server.stop()
            await task


def _measure(port: int, certificate: str) -> list[float]:
    """Send the reviews from a process of its own, as the API server is one."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_send_reviews, args=(port, certificate, sender))
    process.start()
    seconds: list[float] = receiver.recv()
    process.join()
    return seconds


def _send_reviews(port: int, certificate: str, result: Connection) -> None:
    from http.client import HTTPSConnection

    connection = HTTPSConnection("localhost", port, context=ssl.create_default_context(cadata=certificate))
    seconds = []
    for number in range(WARM_UP + REVIEWS):
        request = {"uid": str(number), "operation": "CREATE", "namespace": "team", "name": "job", "object": JOB}
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        body = json.dumps(review)
        began = time.perf_counter()
        connection.request("POST", "/admission", body, {"Content-Type": "application/json"})
        answer = connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
        response = json.loads(answer)["response"]
        assert response["allowed"] and response["patch"], response
    result.send(seconds[WARM_UP:])


@contextlib.contextmanager
def _api_server(folder: Path) -> Iterator[None]:
    """An API server with one runtime, and the kubeconfig for it."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_serve_runtime, args=(sender,), daemon=True)
    process.start()
    kubeconfig = folder / "kubeconfig"
    config = {
        "clusters": [{"name": "memory", "cluster": {"server": f"http://127.0.0.1:{receiver.recv()}"}}],
        "users": [{"name": "memory", "user": {"token": "none"}}],
        "contexts": [{"name": "memory", "context": {"cluster": "memory", "user": "memory"}}],
        "current-context": "memory",
    }
    kubeconfig.write_text(json.dumps(config))
    os.environ["KUBECONFIG"] = str(kubeconfig)
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _serve_runtime(port: Connection) -> None:
    body = json.dumps(RUNTIME).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet for head and body: with two, TCP waits 40 ms for an acknowledgement

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        port.send(server.server_port)
        server.serve_forever()


if __name__ == "__main__":
    show(figures())
