"""Many progressing jobs, and what they cost the operator: python -m tests.cluster.kit.operator_load '{"jobs": 100, …}'

Runs in the network of the cluster, and prints its findings as JSON. No job has containers: Trainer leaves the TrainJobs
alone, because another controller is said to manage them; their pods are objects on a node that does not exist; and one
server here answers for all their addresses. The operator cannot tell: it lists, watches, polls and writes as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from statistics import quantiles
from typing import Any

from reprieve.errors import KubernetesError, ObjectChanged
from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.kinds import LEASE, POD, TRAIN_JOB, Kind
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.operator_deployment import Operator
from tests.cluster.rig.kubectl import Kubectl
from tests.support.operator_kit import answer, stamp

NODE = Kind("", "v1", "Node", "nodes", namespaced=False)
JOB = Kind("batch", "v1", "Job", "jobs")
ELSEWHERE = "kueue.x-k8s.io/multikueue"
STAND_IN_NODE = "stand-in"
ADDRESSES = ipaddress.ip_network("10.78.0.0/16")
PORT = 28080
METRICS_PORT = 8080
UPDATE_S = 2
"""How often a job reports something new."""
RENEW_S = 10
AT_ONCE = 4
SAMPLE_S = 3.0
FIRST_PROGRESS_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Options:
    namespace: str
    jobs: int
    seconds: float
    """How long to measure, once all jobs have progress."""
    metrics: str
    """The address of the operator's leader: http://…:8080/metrics."""
    warm_up_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What was measured."""

    jobs: int
    seconds: float
    staleness_p50_s: float
    staleness_p99_s: float
    staleness_max_s: float
    """Of `lastUpdateTime`, over all jobs and samples."""
    cores: float
    rss_mib: float
    polls_per_s: float
    writes_per_poll: float


def under_load(cluster: Cluster, operator: Operator, namespace: Kubectl, **options: Any) -> Load:
    """Measure the deployed operator; the jobs are in the namespace. `options`: of `Options`."""
    metrics = f"http://{operator.leader_address()}:{METRICS_PORT}/metrics"
    settings = Options(namespace=namespace.namespace, metrics=metrics, **options)
    try:
        done = cluster.run(sys.executable, "-m", __name__, json.dumps(asdict(settings)))
    finally:
        cluster.kubectl.delete("node", STAND_IN_NODE)  # other tests count the nodes
    assert done.returncode == 0, done.stderr
    return Load(**json.loads(done.stdout))


def counted(operator: Operator, pod: str, name: str) -> float:
    """The sum of a metric of one pod of the operator over its labels, read through the API server."""
    path = f"/api/v1/namespaces/{operator.kubectl.namespace}/pods/{pod}:{METRICS_PORT}/proxy/metrics"
    found = _parse_metrics(operator.cluster.kubectl.run("get", "--raw", path))
    return sum(value for key, value in found.items() if key == name or key.startswith(f"{name}{{"))


async def measure(options: Options) -> Load:
    subprocess.run(["ip", "route", "replace", "local", str(ADDRESSES), "dev", "lo"], check=True)
    async with KubernetesApi(namespace=options.namespace) as api, _progress_server(), _stand_in_node(api):
        await _in_parallel(_create(api, options.namespace, number) for number in range(options.jobs))
        await _until_all_have_progress(api, options.jobs)
        await asyncio.sleep(options.warm_up_s)
        before, began = _metrics(options.metrics), time.monotonic()
        ages: list[float] = []
        while time.monotonic() < began + options.seconds:
            ages += await _ages(api)
            await asyncio.sleep(SAMPLE_S)
        after, seconds = _metrics(options.metrics), time.monotonic() - began
    polls = _difference(before, after, 'reprieve_operator_polls_total{result="ok"}')
    writes = _difference(before, after, 'reprieve_operator_writes_total{what="status",result="ok"}')
    percent = quantiles(ages, n=100)
    return Load(
        jobs=options.jobs,
        seconds=round(seconds, 1),
        staleness_p50_s=round(percent[49], 1),
        staleness_p99_s=round(percent[98], 1),
        staleness_max_s=round(max(ages), 1),
        cores=round(_difference(before, after, "process_cpu_seconds_total") / seconds, 3),
        rss_mib=round(after["process_resident_memory_bytes"] / 2**20, 1),
        polls_per_s=round(polls / seconds, 2),
        writes_per_poll=round(writes / max(1.0, polls), 2),
    )


async def _create(api: KubernetesApi, namespace: str, number: int) -> None:
    """A TrainJob, the Job that owns its pod, and the pod, which runs."""
    name = f"load-{number}"
    settings = {"storage": {"uri": f"pvc://claim/{name}"}, "interval": "5m"}
    await api.create(
        TRAIN_JOB,
        {
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"runtimeRef": {"name": "reprieve-torch"}, "managedBy": ELSEWHERE, "checkpointing": settings},
        },
    )
    container = {"name": "node", "image": "none", "command": ["none"]}
    pod_spec = {
        "containers": [container],
        "restartPolicy": "Never",
        "nodeName": STAND_IN_NODE,
        "tolerations": [{"operator": "Exists"}],
    }
    template = {"metadata": {"labels": {"load": name}}, "spec": {"containers": [container], "restartPolicy": "Never"}}
    owner = await api.create(
        JOB,
        {
            "metadata": {"name": f"{name}-node-0", "namespace": namespace},
            "spec": {"managedBy": "example.com/nobody", "template": template},
        },
    )
    reference = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": f"{name}-node-0",
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    labels = {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/jobset-uid": name,
        "jobset.sigs.k8s.io/job-index": "0",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    metadata: dict[str, Any] = {
        "name": f"{name}-node-0-0-load",
        "namespace": namespace,
        "labels": labels,
        "ownerReferences": [reference],
    }
    await api.create(POD, {"metadata": metadata, "spec": pod_spec})
    address = str(ADDRESSES[number + 1])
    running = {"state": {"running": {"startedAt": stamp(_now())}}, "ready": True, "restartCount": 0}
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [{"name": "node", "image": "none", "imageID": "none", **running}],
    }
    await api.apply_status(POD, metadata["name"], {"metadata": metadata, "status": status}, namespace=namespace)


async def _in_parallel(work: Iterable[Awaitable[None]]) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(each: Awaitable[None]) -> None:
        async with slots:
            await each

    await asyncio.gather(*(one(each) for each in work))


async def _until_all_have_progress(api: KubernetesApi, jobs: int) -> None:
    deadline = time.monotonic() + FIRST_PROGRESS_S
    while (count := len(await _ages(api))) < jobs:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {count} of {jobs} jobs have progress after {FIRST_PROGRESS_S:g} s")
        await asyncio.sleep(1)


async def _ages(api: KubernetesApi) -> list[float]:
    """How old the data of each job is that has some."""

    def updated(job: dict[str, Any]) -> str:
        progress = (job.get("status") or {}).get("trainingProgress") or {}
        return str(progress.get("lastUpdateTime") or "")

    found, _ = await api.list_reduced(TRAIN_JOB, updated)
    now = _now()
    return [(now - datetime.fromisoformat(each.replace("Z", "+00:00"))).total_seconds() for each in found if each]


@contextlib.asynccontextmanager
async def _progress_server() -> AsyncIterator[None]:
    """Answer for every pod."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            seconds = int(time.time()) // UPDATE_S * UPDATE_S
            updated = stamp(datetime.fromtimestamp(seconds, timezone.utc))
            content = answer(step=seconds % 1_000_000, totalSteps=2_000_000, lastUpdateTime=updated)
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(content).encode())
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "0.0.0.0", PORT, backlog=1024):
        yield


@contextlib.asynccontextmanager
async def _stand_in_node(api: KubernetesApi) -> AsyncIterator[None]:
    """A node without a kubelet that stays ready, because its lease is renewed."""
    with contextlib.suppress(ObjectChanged):  # of a run that was killed
        await api.create(NODE, {"metadata": {"name": STAND_IN_NODE}, "spec": {"unschedulable": True}})
    ready = {"type": "Ready", "status": "True", "reason": "StandIn", "lastHeartbeatTime": stamp(_now())}

    async def renew() -> None:
        while True:
            now = _now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            spec = {"holderIdentity": STAND_IN_NODE, "leaseDurationSeconds": 40, "renewTime": now}
            with contextlib.suppress(KubernetesError):
                await api.merge_patch(LEASE, STAND_IN_NODE, {"spec": spec}, namespace="kube-node-lease")
            await asyncio.sleep(RENEW_S)

    lease = {"metadata": {"name": STAND_IN_NODE, "namespace": "kube-node-lease"}, "spec": {}}
    with contextlib.suppress(ObjectChanged):
        await api.create(LEASE, lease, namespace="kube-node-lease")
    status = {"metadata": {"name": STAND_IN_NODE}, "status": {"conditions": [ready]}}
    await api.apply_status(NODE, STAND_IN_NODE, status)
    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answered:
        return _parse_metrics(answered.read().decode())


def _parse_metrics(text: str) -> dict[str, float]:
    found = [re.fullmatch(r"([^ #]\S*) (\S+)", line) for line in text.splitlines()]
    return {each[1]: float(each[2]) for each in found if each is not None}


def _difference(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before[name]


def _now() -> datetime:
    return datetime.now(timezone.utc)


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(measure(Options(**json.loads(sys.argv[1])))))))
