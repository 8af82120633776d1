"""What `status.trainingProgress` of a TrainJob says, and which Events the operator made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cluster.kit.objects import Object
from tests.cluster.rig.kubectl import Kubectl

POLL_ANNOTATION = "trainer.opendatahub.io/metrics-poll-interval"
POLL_S = 5
"""As the annotation: the shortest."""


def progress_of(job: Object) -> dict[str, Any]:
    return dict(job.get("status", {}).get("trainingProgress", {}))


def wait_for(
    namespace: Kubectl, name: str, condition: Callable[[dict[str, Any]], bool], within_s: float = 120
) -> dict[str, Any]:
    """Wait until the condition holds for the progress of a job, and return it."""
    found = namespace.wait_for("trainjob", name, lambda job: condition(progress_of(job)), timeout_s=within_s)
    return progress_of(found)


def wait_for_state(namespace: Kubectl, name: str, state: str, within_s: float = 120) -> dict[str, Any]:
    return wait_for(namespace, name, lambda progress: progress.get("state") == state, within_s)


def events_of(namespace: Kubectl, name: str) -> list[tuple[str, str]]:
    """Reasons and messages of the operator's Events about a job, in their order."""
    found = [each for each in namespace.list("events") if each["involvedObject"]["name"] == name]
    ours = [each for each in found if each.get("source", {}).get("component") == "reprieve-operator"]
    ours.sort(key=lambda each: int(each["metadata"]["resourceVersion"]))
    return [(each["reason"], each["message"]) for each in ours]
