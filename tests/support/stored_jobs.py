"""TrainJobs and their pods as an API server stores them, and what Kueue, Trainer and the kubelets do with them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from tests.support.kubernetes_server import KubernetesServer

Object = dict[str, Any]
PATH = "/workspace/checkpoints/checkpoint-57"


def ago(seconds: float = 0) -> str:
    return f"{datetime.now(timezone.utc) - timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"


def stored_job(name: str = "finetune", *, created: str = "2026-11-19T05:00:00Z", **status: Any) -> Object:
    metadata = {"name": name, "namespace": "system", "uid": f"uid-{name}", "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"suspend": False}, "status": status}


def job_pod(name: str, *, rank: int = 0, phase: str = "Running", of: str = "finetune", **extra: Any) -> Object:
    state: Object = {"Running": {"running": {}}, "Pending": {"waiting": {"reason": "ImagePullBackOff"}}}.get(phase, {})
    return {
        "metadata": {
            "name": name,
            "namespace": "system",
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-11-19T05:00:00Z",
            "labels": {
                "jobset.sigs.k8s.io/jobset-name": of,
                "batch.kubernetes.io/job-completion-index": str(rank),
            },
            "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": f"{of}-node-0", "uid": "j", "controller": True}
            ],
            **extra,
        },
        "spec": {"containers": [{"name": "node"}], "terminationGracePeriodSeconds": 3},
        "status": {"phase": phase, "containerStatuses": [{"name": "node", "state": state}]},
    }


def ended_pod(found: Object, code: int, **message: Any) -> Object:
    """The pod after its training container has ended, with a termination message."""
    content = {
        "trainMetrics": {"loss": 0.5},
        "evalMetrics": {},
        "state": "stopped",
        "step": 57,
        "saved": True,
        "message": "saved at step 57 in 0.4 s",
        "lastUpdateTime": ago(),
        "checkpointing": {"enabled": True, "latestCheckpoint": PATH},
        **message,
    }
    terminated = {"exitCode": code, "message": json.dumps(content)}
    status = {"phase": "Failed", "containerStatuses": [{"name": "node", "state": {"terminated": terminated}}]}
    return {**found, "status": status}


def when(condition: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    """Do something as soon as a condition holds, as a controller does."""

    def run() -> None:
        end = time.monotonic() + 20
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def stop_all_pods(server: KubernetesServer, **message: Any) -> None:
    """As the kubelet and the Job controller do: the objects are gone at once."""
    for name in [key[2] for key in list(server.objects) if key[0] == "pods"]:
        server.put("pods", ended_pod(server.get("pods", name, "system"), 143, **message))
        server.delete("pods", name, "system")
