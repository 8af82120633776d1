"""TrainJobs, runtimes and reviews for tests of what Reprieve adds to them."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import yaml

from reprieve.operator.admission import respond
from tests.support.places import ROOT

Object = dict[str, Any]

RUNTIME: Object = yaml.safe_load((ROOT / "deploy/runtimes/reprieve-torch.yaml").read_text())
STORAGE: Object = {
    "uri": "/workspace/checkpoints",
    "persistentVolume": {"claimName": "shared", "mountPath": "/workspace"},
}


def train_job_with(settings: object, *, name: str | None = "job", **trainer: Any) -> Object:
    """A TrainJob with `spec.checkpointing`; `settings` of None leave the field out."""
    spec: Object = {"runtimeRef": {"name": "reprieve-torch"}}
    if trainer := trainer or {"command": ["torchrun", "train.py"]}:
        spec["trainer"] = {key: value for key, value in trainer.items() if value is not None}
    if settings is not None:
        spec["checkpointing"] = settings
    metadata = {"name": name} if name else {"generateName": "job-"}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def plain_runtime(**pod: Any) -> Object:
    """A runtime like Trainer's own: no failure policy, no command."""
    container = {"name": "node", "image": "torch", **pod.pop("container", {})}
    spec = {"template": {"spec": {"containers": [container], **pod}}}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": spec}}
    return {"metadata": {"name": "torch-distributed"}, "spec": {"template": {"spec": {"replicatedJobs": [job]}}}}


def create(job: Object, runtime: Object | None = RUNTIME) -> tuple[Object, Object]:
    """Create a job: the job as stored, and the response of the webhook."""
    return _reviewed({"operation": "CREATE", "object": job}, runtime)


def update(old: Object, new: Object) -> tuple[Object, Object]:
    return _reviewed({"operation": "UPDATE", "object": new, "oldObject": old}, None)


def refusal(job: Object, runtime: Object | None = RUNTIME) -> str:
    """The message with which a job is refused."""
    _, response = create(job, runtime)
    assert not response["allowed"], response
    return str(response["status"]["message"])


def _reviewed(request: Object, runtime: Object | None) -> tuple[Object, Object]:
    review = {"request": {"uid": "5", "namespace": "team", **request}}
    before = copy.deepcopy(review)
    response = respond(review, runtime)["response"]
    assert review == before, "a decision changes nothing that it is given"
    job = copy.deepcopy(request["object"])
    for operation in json.loads(base64.b64decode(response.get("patch", "W10="))):
        *path, name = operation["path"].strip("/").split("/")
        target = job
        for step in path:
            target = target[step]
        assert operation["op"] == "add"
        target[name] = operation["value"]
    return job, response
