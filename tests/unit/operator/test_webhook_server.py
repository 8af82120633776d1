"""The webhook's server over real TLS: what it answers, what it logs, and how it stops."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Any

import httpx
import pytest

from reprieve.errors import ApiUnreachable, KubernetesError
from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.runtime import RuntimeReference
from reprieve.operator.certificates import CertificatePair, make_pair
from reprieve.operator.serving_context import ServingContext
from reprieve.operator.webhook_server import MAX_BODY_BYTES, WebhookServer, runtime_reader
from tests.support.kubernetes_server import KubernetesServer

RUNTIME = RuntimeReference("ClusterTrainingRuntime", "torch", "")
FIELD = {"storage": {"uri": "pvc://claim/run"}, "interval": "5m"}


def pair() -> CertificatePair:
    return make_pair(["localhost"], datetime.now(timezone.utc))


class Webhook:
    """A server of a test. `runtime`: what reading it returns or raises."""

    def __init__(self) -> None:
        self.pair = pair()
        self.serving = ServingContext()
        self.serving.load(self.pair.certificate, self.pair.key)
        self.runtime: Any = None
        self.read: list[RuntimeReference] = []
        self.missing = ""
        self.hold = asyncio.Event()
        self.hold.set()
        self.server = WebhookServer(self._read, self.serving, missing=lambda: self.missing, address=("localhost", 0))

    async def _read(self, reference: RuntimeReference) -> Any:
        self.read.append(reference)
        await self.hold.wait()
        if isinstance(self.runtime, KubernetesError):
            raise self.runtime
        return self.runtime

    def client(self, trusted: CertificatePair | None = None) -> httpx.AsyncClient:
        context = ssl.create_default_context(cadata=(trusted or self.pair).certificate)
        return httpx.AsyncClient(base_url=f"https://localhost:{self.server.port}", verify=context)

    async def admit(self, review: Any) -> httpx.Response:
        async with self.client() as client:
            content = review if isinstance(review, bytes) else json.dumps(review).encode()
            return await client.post("/admission", content=content)


def serve(scenario: Callable[[Webhook], Awaitable[None]]) -> None:
    async def run() -> None:
        webhook = Webhook()
        task = asyncio.create_task(webhook.server.run())
        try:
            await scenario(webhook)
        finally:
            webhook.server.stop()
            await asyncio.wait_for(task, 20)

    asyncio.run(run())


def review(operation: str = "CREATE", **checkpointing: Any) -> dict[str, Any]:
    job: dict[str, Any] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "job", "namespace": "team"},
        "spec": {"runtimeRef": {"name": "torch"}, "trainer": {"command": ["python", "train.py"]}},
    }
    if checkpointing:
        job["spec"]["checkpointing"] = checkpointing
    request = {"uid": "a-uid", "operation": operation, "namespace": "team", "name": "job", "object": job}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def test_a_review_is_answered_with_the_runtime_of_the_job() -> None:
    async def scenario(webhook: Webhook) -> None:
        found = (await webhook.admit(review(**FIELD))).json()
        assert found["response"]["uid"] == "a-uid"
        assert found["response"]["allowed"] is True, found
        assert found["response"]["patchType"] == "JSONPatch"
        assert webhook.read == [RUNTIME]

    serve(scenario)


def test_an_update_reads_no_runtime() -> None:
    async def scenario(webhook: Webhook) -> None:
        assert (await webhook.admit(review("UPDATE"))).json()["response"]["allowed"] is True
        assert webhook.read == []

    serve(scenario)


def test_a_refusal_is_logged_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(webhook: Webhook) -> None:
        bad = {"storage": {"uri": "ftp://me:hunter22@host/run"}}
        answer = (await webhook.admit(review(**bad))).json()["response"]
        assert answer["allowed"] is False
        await webhook.admit(review(**FIELD))

    serve(scenario)
    [record] = [each for each in caplog.records if each.name.startswith("reprieve")]
    from reprieve.operator.log import JsonFormatter

    line = json.loads(JsonFormatter().format(record))
    assert (line["operation"], line["namespace"], line["name"]) == ("CREATE", "team", "job")
    assert "hunter22" not in json.dumps(line)


def test_a_runtime_that_cannot_be_read_refuses_the_job() -> None:
    async def scenario(webhook: Webhook) -> None:
        webhook.runtime = ApiUnreachable("cannot get ClusterTrainingRuntime torch: no answer")
        answer = (await webhook.admit(review(**FIELD))).json()["response"]
        assert (answer["uid"], answer["allowed"], answer["status"]["code"]) == ("a-uid", False, 503)
        assert "cannot get ClusterTrainingRuntime torch: no answer; try again" in answer["status"]["message"]

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not an AdmissionReview"),
        (b'{"kind": "Pod"}', "not an AdmissionReview"),
        (b'{"kind": "AdmissionReview"}', "without request.uid"),
        (b'{"kind": "AdmissionReview", "request": {"uid": 5}}', "without request.uid"),
        (b'"' + b"x" * MAX_BODY_BYTES + b'"', "more than 3 MiB"),
    ],
    ids=["empty", "no-text", "deep", "list", "pod", "no-request", "bad-uid", "large"],
)
def test_a_body_that_is_no_review_is_a_400_with_the_reason(body: bytes, reason: str) -> None:
    async def scenario(webhook: Webhook) -> None:
        answer = await webhook.admit(body)
        assert answer.status_code == 400
        assert reason in answer.text
        assert (await webhook.admit(review())).status_code == 200, "the next one is answered"

    serve(scenario)


def test_readiness_names_what_is_missing() -> None:
    async def scenario(webhook: Webhook) -> None:
        webhook.missing = "no certificate yet"
        async with webhook.client() as client:
            answers = [await client.get(path) for path in ("/healthz", "/readyz")]
            assert [(each.status_code, each.text) for each in answers] == [(200, "ok\n"), (503, "no certificate yet\n")]
            webhook.missing = ""
            assert (await client.get("/readyz")).status_code == 200

    serve(scenario)


def test_a_new_certificate_is_used_for_new_connections_while_open_ones_stay() -> None:
    async def scenario(webhook: Webhook) -> None:
        new = pair()
        async with webhook.client() as before, webhook.client(new) as after:
            assert (await before.get("/healthz")).status_code == 200
            webhook.serving.load(new.certificate, new.key)
            assert (await before.get("/healthz")).status_code == 200
            assert (await after.get("/healthz")).status_code == 200

    serve(scenario)


def test_a_stopping_server_answers_and_finishes_what_it_has_begun() -> None:
    async def scenario(webhook: Webhook) -> None:
        webhook.hold.clear()
        async with webhook.client() as client:
            begun = asyncio.create_task(client.post("/admission", content=json.dumps(review(**FIELD))))
            while not webhook.read:
                await asyncio.sleep(0.01)
            webhook.server.drain()
            not_ready = await client.get("/readyz")
            assert (not_ready.status_code, not_ready.text) == (503, "stopping\n")
            late = await client.post("/admission", content=json.dumps(review("UPDATE")))
            assert (late.status_code, late.headers["connection"]) == (200, "close")
            webhook.server.stop()
            await asyncio.sleep(0.3)
            assert not begun.done()
            webhook.hold.set()
            assert (await begun).json()["response"]["allowed"] is True

    serve(scenario)


def test_a_small_answer_is_sent_at_once() -> None:
    """Not after 40 ms, when the other side has acknowledged the first of its two packets."""

    async def scenario(webhook: Webhook) -> None:
        seconds = []
        async with webhook.client() as client:
            for _ in range(20):
                began = time.perf_counter()
                await client.post("/admission", content=json.dumps(review("UPDATE")))
                seconds.append(time.perf_counter() - began)
        assert min(seconds) < 0.03, "the quickest: the machine may be busy"

    serve(scenario)


def test_runtimes_are_read_from_the_api_server(tmp_path: Any) -> None:
    async def scenario() -> None:
        async with KubernetesApi() as api:
            read = runtime_reader(api)
            assert (await read(RUNTIME) or {})["metadata"]["name"] == "torch"
            assert await read(RuntimeReference("TrainingRuntime", "torch", "team")) is None
            server.slow_s = 1.0
            with pytest.raises(ApiUnreachable, match=r"cannot get ClusterTrainingRuntime torch: no answer in 0.3 s"):
                await runtime_reader(api, timeout_s=0.3)(RUNTIME)

    with KubernetesServer(tmp_path) as server:
        server.put("clustertrainingruntimes", {"metadata": {"name": "torch"}})
        asyncio.run(scenario())
