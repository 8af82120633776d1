"""What the operator keeps of TrainJobs and pods: the dozen fields that it uses. 2,000 whole pods take 111 MiB."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from reprieve.errors import ConfigError
from reprieve.kubernetes import checkpointing, pausing
from reprieve.kubernetes.checkpointing import Checkpointing
from reprieve.kubernetes.jobs import training_progress
from reprieve.kubernetes.jobs.pods import PORT_VARIABLE, port_number
from reprieve.kubernetes.jobs.training_progress import TrainingProgress, Unusable
from reprieve.kubernetes.names import (
    CHECKPOINTING_ANNOTATION,
    JOB_SET_LABEL,
    PROGRESS_ANNOTATION,
    TRAINER_CONTAINER,
)
from reprieve.kubernetes.pausing import QUEUE_LABEL, PauseRecord
from reprieve.progress.sinks.http import PORT

Object = dict[str, Any]

POLL_ANNOTATION = "trainer.opendatahub.io/metrics-poll-interval"
"""The same as Red Hat's controller reads: seconds, or a text such as 30s."""
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
JOB_INDEX_LABEL = "jobset.sigs.k8s.io/job-index"
RESTARTS_LABEL = "jobset.sigs.k8s.io/restart-attempt"
MAX_SETTINGS_LENGTH = 16 * 1024
"""Characters. Parsed settings stay in memory, with their text."""
DEFAULT_GRACE_S = 30
"""Kubernetes' own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedJob:
    """A TrainJob that asks for checkpoints."""

    namespace: str
    name: str
    uid: str
    version: int
    """Its resource version."""
    created: datetime | None
    nodes: int
    is_suspended: bool
    is_queued: bool
    """Kueue decides when it runs."""
    end: str
    """`Complete` or `Failed`; empty: it has not ended."""
    end_message: str
    pause: PauseRecord | None
    settings: Checkpointing
    has_field: bool
    """spec.checkpointing is there, not only the annotation."""
    poll_interval: timedelta | None
    progress: TrainingProgress
    """As it is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedContainer:
    """The training container of a pod."""

    started: datetime | None
    """It runs since then; None: it does not run."""
    waiting: str
    """Why it waits: `ContainerCreating`, `CreateContainerConfigError`."""
    waiting_message: str
    exit_code: int | None
    """None: it has not ended."""
    exit_reason: str
    message: str
    """The termination message."""
    ended: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """A pod of a JobSet."""

    namespace: str
    name: str
    uid: str
    version: int
    """Its resource version."""
    job: str
    """The JobSet, which has the name of the TrainJob."""
    owner: str
    """The Job that controls it; empty: none does."""
    rank: int
    """The index of its node."""
    created: datetime | None
    restart: int
    """How often JobSet has restarted all pods before this one."""
    grace: timedelta
    """From SIGTERM to SIGKILL."""
    address: str
    is_on_host_network: bool
    """Its address is that of its node: other programs listen there, too."""
    port: int | None
    node: str
    phase: str
    unscheduled: str
    """Why the scheduler has no node for it."""
    scheduled_at: datetime | None
    """When it got its node."""
    has_sandbox: bool
    """Its volumes are mounted and its network is there."""
    disruption: str
    """The reason of the condition DisruptionTarget, such as `EvictionByEvictionAPI`."""
    deleted_at: datetime | None
    """When its grace period is over; None: it is not deleted."""
    container: ObservedContainer
    gone_at: datetime | None = None
    """Since when the object no longer exists."""

    def belongs_to(self, job: ObservedJob) -> bool:
        """Whether it is a pod of this job, and not of one before it with the same name."""
        is_younger = job.created is None or self.created is None or self.created >= job.created
        return is_younger and self.is_controlled_by(job)

    def is_controlled_by(self, job: ObservedJob) -> bool:
        """Whether a Job of its JobSet controls it. Labels alone prove nothing.

        The uid of that Job is not checked: Kubernetes deletes a pod whose owner does not exist.
        """
        return self.namespace == job.namespace and self.owner.startswith(f"{job.name}-")

    @property
    def is_gone(self) -> bool:
        return self.gone_at is not None

    @property
    def has_ended(self) -> bool:
        return self.container.exit_code is not None

    @property
    def why_not_polled(self) -> str:
        """Why nobody may ask it for its progress; empty: it may be polled."""
        if self.port is None:
            return f"{PORT_VARIABLE} turns its progress off"
        # Whoever may create a job would choose an address and a port that the operator calls, and see what comes of it.
        if self.is_on_host_network:
            return "it uses the network of its node (hostNetwork), where the operator calls nothing"
        return ""

    @property
    def is_running(self) -> bool:
        return self.container.started is not None and not self.is_gone


def job_of(found: Mapping[str, Any]) -> ObservedJob | None:
    """Return what is kept of a TrainJob. None: it does not ask for checkpoints, its settings cannot be read or are too
    long, or it is being deleted."""
    metadata, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
    annotations = metadata.get("annotations") or {}
    field, text = spec.get("checkpointing"), annotations.get(CHECKPOINTING_ANNOTATION)
    content = json.dumps(field, sort_keys=True) if text is None else ""
    if len(text or content) > MAX_SETTINGS_LENGTH:
        return None
    settings = _settings(text, content)
    if settings is None or not settings.enabled or metadata.get("deletionTimestamp"):
        return None
    labels = metadata.get("labels") or {}
    conditions = status.get("conditions") or ()
    end, record = pausing.end_of(found), PauseRecord.from_job(found)
    return ObservedJob(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        version=_number(metadata.get("resourceVersion"), 0),
        created=_time(metadata.get("creationTimestamp")),
        nodes=int((spec.get("trainer") or {}).get("numNodes") or 1),
        is_suspended=pausing.is_suspended(found),
        is_queued=QUEUE_LABEL in labels,
        end=end,
        end_message=next((str(each.get("message", "")) for each in conditions if each.get("type") == end), ""),
        pause=record if record is not None and record.workload else pausing.pause_of(found, None),
        settings=settings,
        has_field=field is not None,
        poll_interval=_poll_interval(annotations.get(POLL_ANNOTATION)),
        progress=_stored_progress(status, annotations),
    )


def pod_of(found: Mapping[str, Any]) -> ObservedPod | None:
    """Return what is kept of a pod; None: it is not one that trains."""
    metadata, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
    labels = metadata.get("labels") or {}
    containers = [each for each in spec.get("containers") or () if each.get("name") == TRAINER_CONTAINER]
    if JOB_SET_LABEL not in labels or not containers or labels.get(JOB_INDEX_LABEL, "0") != "0":
        return None
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    owners = [each for each in metadata.get("ownerReferences") or () if each.get("controller")]
    address = str(status.get("podIP") or "")
    return ObservedPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        version=_number(metadata.get("resourceVersion"), 0),
        job=labels[JOB_SET_LABEL],
        owner=next((str(each.get("name", "")) for each in owners if each.get("kind") == "Job"), ""),
        rank=_number(labels.get(INDEX_LABEL), 0),
        created=_time(metadata.get("creationTimestamp")),
        restart=_number(labels.get(RESTARTS_LABEL), 0),
        grace=timedelta(seconds=_number(spec.get("terminationGracePeriodSeconds"), DEFAULT_GRACE_S)),
        address=address,
        is_on_host_network=bool(spec.get("hostNetwork")) or (address != "" and address == status.get("hostIP")),
        port=_port(containers[0]),
        node=str(spec.get("nodeName") or ""),
        phase=str(status.get("phase") or ""),
        unscheduled=str(scheduled.get("message") or "") if scheduled.get("status") == "False" else "",
        scheduled_at=_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        has_sandbox=(conditions.get("PodReadyToStartContainers") or {}).get("status") == "True",
        disruption=str((conditions.get("DisruptionTarget") or {}).get("reason") or ""),
        deleted_at=_time(metadata.get("deletionTimestamp")),
        container=_container(status),
    )


def _container(status: Mapping[str, Any]) -> ObservedContainer:
    statuses = [each for each in status.get("containerStatuses") or () if each.get("name") == TRAINER_CONTAINER]
    state = (statuses[0].get("state") if statuses else None) or {}
    waiting, running, ended = state.get("waiting") or {}, state.get("running") or {}, state.get("terminated") or {}
    return ObservedContainer(
        started=_time(running.get("startedAt")),
        waiting=str(waiting.get("reason") or ""),
        waiting_message=str(waiting.get("message") or ""),
        exit_code=ended.get("exitCode"),
        exit_reason=str(ended.get("reason") or ""),
        message=str(ended.get("message") or ""),
        ended=_time(ended.get("finishedAt")),
    )


@lru_cache(maxsize=4096)
def _settings(annotation: str | None, field: str) -> Checkpointing | None:
    """Jobs change many times a minute, and their settings never do."""
    try:
        if annotation is not None:
            return checkpointing.from_yaml(annotation, "")
        content = json.loads(field)
        return None if content is None else checkpointing.parse(content, "")
    except ConfigError:
        return None


def _stored_progress(status: Mapping[str, Any], annotations: Mapping[str, Any]) -> TrainingProgress:
    content = status.get("trainingProgress")
    if content is None and (text := annotations.get(PROGRESS_ANNOTATION)) is not None:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = None
    return training_progress.parse(content or {})[0]


def _poll_interval(text: object) -> timedelta | None:
    try:
        seconds = float(str(text).strip().removesuffix("s"))
    except ValueError:
        return None
    return timedelta(seconds=min(300.0, max(5.0, seconds))) if seconds == seconds else None  # noqa: PLR0124 - NaN


def _port(container: Mapping[str, Any]) -> int | None:
    """The port of the progress server; None: it has none that can be known."""
    values = {each.get("name"): each.get("value") for each in container.get("env") or ()}
    text = values.get(PORT_VARIABLE)
    if text is None:
        return PORT
    return port_number(str(text))


def _number(text: object, default: int) -> int:
    return int(str(text)) if str(text).isdigit() else default


def _time(text: object) -> datetime | None:
    try:
        return training_progress.time(text)
    except Unusable:
        return None
