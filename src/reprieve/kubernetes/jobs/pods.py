"""The pods of a TrainJob: which of them train, which rank they are, and what they are doing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reprieve.kubernetes.names import JOB_SET_LABEL, TRAINER_CONTAINER
from reprieve.progress.sinks.http import PORT

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
PORT_VARIABLE = "REPRIEVE_METRICS_PORT"
DEFAULT_GRACE_S = 30
_UNAVAILABLE = re.compile(r"nodes are available: (?P<reasons>[^.]*)")


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that trains, as the API server returned it."""

    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.content["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.content["metadata"]["uid"])

    @property
    def rank(self) -> int:
        """Of its node."""
        index = (self.content["metadata"].get("labels") or {}).get(INDEX_LABEL, "0")
        return int(index) if str(index).isdigit() else 0

    @property
    def created(self) -> str:
        return str(self.content["metadata"].get("creationTimestamp", ""))

    @property
    def phase(self) -> str:
        return str(self._status.get("phase") or "Pending")

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_running(self) -> bool:
        return "running" in self._container_state

    @property
    def is_deleted(self) -> bool:
        """It uses its grace period: it has received SIGTERM."""
        return "deletionTimestamp" in self.content["metadata"]

    @property
    def grace_s(self) -> int:
        return int(self._spec.get("terminationGracePeriodSeconds") or DEFAULT_GRACE_S)

    @property
    def exit_code(self) -> int | None:
        """Of the training container; None: it has not ended."""
        code = (self._container_state.get("terminated") or {}).get("exitCode")
        return code if isinstance(code, int) else None

    @property
    def termination_message(self) -> str:
        return str((self._container_state.get("terminated") or {}).get("message") or "")

    @property
    def why_it_waits(self) -> str:
        """Why it does not run yet: `Insufficient cpu`, `ImagePullBackOff`; empty: not known."""
        for condition in self._status.get("conditions") or ():
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                message = str(condition.get("message") or condition.get("reason") or "")
                found = _UNAVAILABLE.search(message)
                reasons = found["reasons"].split(",") if found else [message]
                return ", ".join(re.sub(r"^\s*\d+ ", "", reason).strip() for reason in reasons)
        return str((self._container_state.get("waiting") or {}).get("reason") or "")

    @property
    def metrics_port(self) -> int:
        """Where it serves its progress."""
        values = {each.get("name"): each.get("value") for each in self._container.get("env") or ()}
        return port_number(str(values.get(PORT_VARIABLE))) or PORT

    @property
    def _spec(self) -> Mapping[str, Any]:
        return self.content.get("spec") or {}

    @property
    def _status(self) -> Mapping[str, Any]:
        return self.content.get("status") or {}

    @property
    def _container(self) -> Mapping[str, Any]:
        return next((each for each in self._spec.get("containers") or () if each["name"] == TRAINER_CONTAINER), {})

    @property
    def _container_state(self) -> Mapping[str, Any]:
        for status in self._status.get("containerStatuses") or ():
            if status.get("name") == TRAINER_CONTAINER:
                return status.get("state") or {}
        return {}


def port_number(text: str) -> int | None:
    """Return the number of a port that a person has written; None: it is not one."""
    return int(text) if re.fullmatch("[0-9]{1,5}", text) and 0 < int(text) < 65536 else None


def pods_of(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> list[Pod]:
    """Return the pods that train the job, oldest first. Labels alone prove nothing: Jobs of its JobSet control them."""
    name = str(job["metadata"]["name"])
    found = []
    for pod in pods:
        metadata = pod["metadata"]
        owners = [each for each in metadata.get("ownerReferences") or () if each.get("controller")]
        is_its_own = any(each.get("kind") == "Job" and each["name"].startswith(f"{name}-") for each in owners)
        trains = any(each["name"] == TRAINER_CONTAINER for each in pod["spec"]["containers"])
        if (metadata.get("labels") or {}).get(JOB_SET_LABEL) == name and is_its_own and trains:
            found.append(Pod(pod))
    return sorted(found, key=lambda pod: (pod.created, pod.name))


def rank_zero(pods: Iterable[Pod]) -> Pod | None:
    """Return the newest pod of rank 0."""
    return next((pod for pod in reversed(list(pods)) if pod.rank == 0), None)
