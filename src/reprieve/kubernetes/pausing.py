"""Pauses and resumes a TrainJob: what to patch, and when it is done. Pure functions of objects.

    TrainJob, its Workload → pause | resume → patches, in order → (whoever calls writes them) → unfinished_pods

Where Kueue admits the job, its Workload is deactivated, because Kueue reverts a direct suspend. Elsewhere the job is
suspended. Its pods get SIGTERM then, and save. A record of the pause stays on the job, so that a resume undoes this
pause and nothing else: a job that somebody else has suspended, or that waits for quota, stays as it is.

Each patch is a merge patch that holds the version of the object it was made for. If the object has changed in the
meantime, the API server refuses the patch (ObjectChanged): read everything again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from reprieve.errors import KubernetesError
from reprieve.kubernetes.kinds import EARLIER_WORKLOAD, TRAIN_JOB, WORKLOAD, Kind, Object
from reprieve.kubernetes.names import JOB_SET_LABEL, PAUSE_ANNOTATION

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
WORKLOAD_JOB_LABEL = "kueue.x-k8s.io/job-uid"
RECORD_VERSION = 1


class CannotPause(KubernetesError):
    """The job is in a state that has nothing to pause; the message names it and what to do."""


class CannotResume(KubernetesError):
    """Reprieve did not pause the job, or it has ended; the message says who did, and what to do."""


@dataclass(frozen=True, slots=True)
class MergePatch:
    """A change of one object."""

    kind: Kind
    name: str
    content: Object


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRecord:
    """Who paused a job, and how. Stored as JSON in the annotation `reprieve.dev/paused-by`."""

    by: str
    """`reprieve pause`, `reprieve operator`, …"""
    reason: str = ""
    """Why, for a person. Empty: because somebody wanted it."""
    time: datetime
    workload: str = ""
    """The Workload that was deactivated. Empty: the job itself was suspended."""

    def to_json(self) -> str:
        time = self.time.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return json.dumps(
            {
                "version": RECORD_VERSION,
                "by": self.by,
                "reason": self.reason,
                "time": time,
                "workload": self.workload,
            }
        )

    @classmethod
    def from_job(cls, job: Mapping[str, Any]) -> PauseRecord | None:
        """Return the record on a job. None also for one that this version cannot read: that pause is not undone."""
        try:
            content = json.loads(_annotations(job)[PAUSE_ANNOTATION])
            if content["version"] != RECORD_VERSION:
                return None
            time = datetime.fromisoformat(str(content["time"]).replace("Z", "+00:00"))
            time = time.astimezone(timezone.utc)
            texts = {name: str(content[name]) for name in ("by", "reason", "workload")}
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return None
        return cls(time=time, **texts)

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        return f"{self.by} at {self.time:%Y-%m-%d %H:%M:%S} UTC{because}"


# What to patch


def pause(
    job: Mapping[str, Any], workload: Mapping[str, Any] | None, *, by: str, now: datetime, reason: str = ""
) -> list[MergePatch]:
    """Return the patches that pause a running or waiting job; none if Reprieve has paused it already.

    `workload`: the one of Kueue that owns the job's quota (`workload_of`), None without Kueue. CannotPause: the job
    has ended, or somebody else has suspended it.
    """
    name = _name(job)
    if end := end_of(job):
        raise CannotPause(f"{name} has ended ({end}): there is nothing to pause")
    if pause_of(job, workload) is not None:
        return []
    if workload is None:
        if is_suspended(job):
            raise CannotPause(f"{name} is suspended already, {_writer(job, 'suspend')}")
        record = PauseRecord(by=by, reason=reason, time=now)
        return [_job_patch(job, record.to_json(), suspend=True)]
    if not _is_active(workload):
        raise CannotPause(f"{name} is stopped already: its Workload is not active, {_writer(workload, 'active')}")
    record = PauseRecord(by=by, reason=reason, time=now, workload=_name(workload))
    # The record first: if the second patch fails, the job still runs, and the next pause writes it anew.
    return [_job_patch(job, record.to_json()), _workload_patch(workload, active=False)]


def resume(job: Mapping[str, Any], workload: Mapping[str, Any] | None) -> list[MergePatch]:
    """Return the patches that undo a pause of Reprieve. CannotResume: there is none."""
    name = _name(job)
    if end := end_of(job):
        raise CannotResume(f"{name} has ended ({end}): create it again to train it again")
    can_be_undone = pause_of(job, workload) is not None or not _stands_still(job, workload)
    if PauseRecord.from_job(job) is None or not can_be_undone:
        raise CannotResume(f"{name} was not paused by Reprieve: {why_it_stands_still(job, workload)}")
    if workload is None:
        return [_job_patch(job, None, suspend=False if is_suspended(job) else None)]
    patches = [_job_patch(job, None)]
    if not _is_active(workload):
        patches.insert(0, _workload_patch(workload, active=True))
    return patches


# What state a job is in


def is_suspended(job: Mapping[str, Any]) -> bool:
    return bool((job.get("spec") or {}).get("suspend"))


def pause_of(job: Mapping[str, Any], workload: Mapping[str, Any] | None) -> PauseRecord | None:
    """Return Reprieve's pause, if it still holds: nobody has started the job since, nor stopped it once more."""
    record = PauseRecord.from_job(job)
    if record is None or not _stands_still(job, workload):
        return None
    paused_by = _managers(job, "f:metadata", "f:annotations", f"f:{PAUSE_ANNOTATION}")
    stopped_by = _managers(workload, "f:spec", "f:active") if workload else _managers(job, "f:spec", "f:suspend")
    return record if paused_by & stopped_by or not (paused_by and stopped_by) else None


def is_queued(job: Mapping[str, Any], workload: Mapping[str, Any] | None) -> bool:
    """Whether the job waits for quota of Kueue."""
    return is_suspended(job) and workload is not None and _is_active(workload)


def end_of(job: Mapping[str, Any]) -> str:
    """Return how the job ended, `Complete` or `Failed`; empty if it has not."""
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            return str(condition["type"])
    return ""


def workload_of(job: Mapping[str, Any], workloads: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the Workload by which Kueue admits the job, the newest if there are several."""
    uid = job["metadata"]["uid"]
    found = [
        each
        for each in workloads
        if any(owner.get("uid") == uid for owner in each["metadata"].get("ownerReferences") or ())
        or (each["metadata"].get("labels") or {}).get(WORKLOAD_JOB_LABEL) == uid
    ]
    return max(found, key=lambda each: str(each["metadata"].get("creationTimestamp", "")), default=None)


def unfinished_pods(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the job's pods that still run, or save: a pause is complete when there are none.

    Pods that are being deleted count, too: they use their grace period.
    """
    return [
        _name(pod)
        for pod in pods
        if (pod["metadata"].get("labels") or {}).get(JOB_SET_LABEL) == _name(job)
        and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
    ]


# Parts


def _job_patch(job: Mapping[str, Any], annotation: str | None, *, suspend: bool | None = None) -> MergePatch:
    """`annotation`: None removes it. `suspend`: None leaves it."""
    metadata = {**_version(job), "annotations": {PAUSE_ANNOTATION: annotation}}
    spec = {} if suspend is None else {"spec": {"suspend": suspend}}
    return MergePatch(TRAIN_JOB, _name(job), {"metadata": metadata, **spec})


def _workload_patch(workload: Mapping[str, Any], *, active: bool) -> MergePatch:
    kind = EARLIER_WORKLOAD if workload.get("apiVersion") == EARLIER_WORKLOAD.api_version else WORKLOAD
    return MergePatch(kind, _name(workload), {"metadata": _version(workload), "spec": {"active": active}})


def _stands_still(job: Mapping[str, Any], workload: Mapping[str, Any] | None) -> bool:
    return is_suspended(job) if workload is None else not _is_active(workload)


def _managers(found: Mapping[str, Any], *path: str) -> set[str]:
    """Return who owns a field, by the API server's records."""

    def owns(fields: Any) -> bool:
        for part in path:
            fields = fields.get(part) if isinstance(fields, Mapping) else None
        return fields is not None

    records = found["metadata"].get("managedFields") or ()
    return {str(each.get("manager")) for each in records if owns(each.get("fieldsV1"))}


def _is_active(workload: Mapping[str, Any]) -> bool:
    return (workload.get("spec") or {}).get("active") is not False


def why_it_stands_still(job: Mapping[str, Any], workload: Mapping[str, Any] | None) -> str:
    """Say what a job without a record of a pause waits for, and what a person can do."""
    name, namespace = _name(job), job["metadata"].get("namespace", "default")
    if workload is not None and not _is_active(workload):
        command = (
            f'kubectl patch workload {_name(workload)} -n {namespace} --type merge -p \'{{"spec":{{"active":true}}}}\''
        )
        return f"its Workload is not active, {_writer(workload, 'active')}. To start it all the same: {command}"
    if is_queued(job, workload):
        queue = (job["metadata"].get("labels") or {}).get(QUEUE_LABEL, "")
        return f"it waits for quota in the queue {queue} of Kueue" if queue else "it waits for quota of Kueue"
    if is_suspended(job):
        command = f'kubectl patch trainjob {name} -n {namespace} --type merge -p \'{{"spec":{{"suspend":false}}}}\''
        return f"it is suspended, {_writer(job, 'suspend')}. To start it all the same: {command}"
    return "it is not suspended"


def _writer(found: Mapping[str, Any], field: str) -> str:
    """Say who has written a field of the spec last: `by kubectl-patch at 2026-11-19T05:00:00Z`."""
    records = [
        each
        for each in found["metadata"].get("managedFields") or ()
        if f"f:{field}" in ((each.get("fieldsV1") or {}).get("f:spec") or {})
    ]
    if not records:
        return "by somebody else"
    record = max(records, key=lambda each: str(each.get("time", "")))
    return f"by {record.get('manager', 'somebody')} at {record.get('time', 'an unknown time')}"


def _annotations(found: Mapping[str, Any]) -> Mapping[str, Any]:
    return found["metadata"].get("annotations") or {}


def _version(found: Mapping[str, Any]) -> Object:
    return {"resourceVersion": found["metadata"]["resourceVersion"]}


def _name(found: Mapping[str, Any]) -> str:
    return str(found["metadata"]["name"])
