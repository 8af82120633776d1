"""Writes what `reconcile` has decided about one job: Events, the status, a dropped field, a pause.

The status is applied server-side, so that this and what others write there do not touch each other. Where the resource
definition has no `trainingProgress`, the API server drops it; then the same JSON goes into an annotation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime

from reprieve.errors import ApiUnreachable, KubernetesError, ObjectChanged, ObjectNotFound
from reprieve.kubernetes import pausing
from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.jobs.training_progress import Condition
from reprieve.kubernetes.kinds import EARLIER_WORKLOAD, EVENT, TRAIN_JOB, WORKLOAD, Object
from reprieve.kubernetes.names import PROGRESS_ANNOTATION
from reprieve.operator.log import fields
from reprieve.operator.metrics.counters import Counters
from reprieve.operator.status.conditions import Event
from reprieve.operator.status.objects import ObservedJob
from reprieve.operator.status.reconcile import Writes

log = logging.getLogger(__name__)

NAME = "reprieve operator"
COMPONENT = "reprieve-operator"
RECHECK_S = 60.0
"""How long a resource definition without our fields counts as one, before they are tried again."""
_MAX_MESSAGE_LENGTH = 1024
"""The API server refuses Events with longer ones."""
_MAX_NAME_LENGTH = 200


class JobWriter:
    """`note`: gets each TrainJob that a write returns."""

    def __init__(self, api: KubernetesApi, counters: Counters, note: Callable[[Object], None]) -> None:
        self._api = api
        self._counters = counters
        self._note = note
        for what in ("event", "status", "field", "pause"):
            for result in ("ok", "error"):
                counters.declare("writes", what=what, result=result)
        self._without_status_until = 0.0
        self._without_field_until = 0.0

    async def write(self, job: ObservedJob, writes: Writes, now: datetime) -> None:
        """Write everything, as far as it goes. KubernetesError: not all of it is written, and it is due again."""
        # First: an operator that ends after this makes the same Events again, under the same names.
        for event in writes.events:
            try:
                await self._counted("event", job, self._create_event(job, event, now))
            except ApiUnreachable:
                raise  # once the condition is written, nobody would make the Event any more
            except KubernetesError:
                pass  # refused, as it would be each time
        if writes.progress is not None:
            await self._counted("status", job, self._write_progress(job, writes.progress.to_json()))
        if writes.field is not None and time.monotonic() >= self._without_field_until:
            await self._counted("field", job, self._restore_field(job, writes.field))
        if writes.pause:
            await self._counted("pause", job, self._pause(job, writes.pause, now))

    async def _counted(self, what: str, job: ObservedJob, write: Awaitable[None]) -> None:
        try:
            await write
        except KubernetesError as error:
            self._counters.add("writes", what=what, result="error")
            if not isinstance(error, ObjectNotFound | ObjectChanged):  # nothing to mend: the job is gone, or newer
                log.warning("%s", error, extra=fields(namespace=job.namespace, name=job.name))
            raise
        self._counters.add("writes", what=what, result="ok")

    async def _create_event(self, job: ObservedJob, event: Event, now: datetime) -> None:
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        former = job.progress.condition(event.reason) or Condition()
        content = [job.uid, event.reason, event.message, former.status, former.message, former.last_transition_time]
        digest = hashlib.sha256("\n".join(map(str, content)).encode()).hexdigest()[:16]
        new = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{job.name[:_MAX_NAME_LENGTH]}.{digest}", "namespace": job.namespace},
            "involvedObject": {
                "apiVersion": TRAIN_JOB.api_version,
                "kind": TRAIN_JOB.name,
                "namespace": job.namespace,
                "name": job.name,
                "uid": job.uid,
                "resourceVersion": str(job.version),
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:_MAX_MESSAGE_LENGTH],
            "source": {"component": COMPONENT},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        with contextlib.suppress(ObjectChanged):  # it exists
            await self._api.create(EVENT, new, namespace=job.namespace)

    async def _write_progress(self, job: ObservedJob, progress: Object) -> None:
        if time.monotonic() >= self._without_status_until:
            content = {"metadata": _identity(job), "status": {"trainingProgress": progress}}
            found = await self._api.apply_status(TRAIN_JOB, job.name, content, namespace=job.namespace)
            if "trainingProgress" in (found.get("status") or {}):
                if PROGRESS_ANNOTATION in (found["metadata"].get("annotations") or {}):  # of a time without the field
                    found = await self._annotate(job, None)
                self._note(found)
                return
            log.info("the definition of TrainJob has no trainingProgress: it goes into the annotations of jobs")
            self._without_status_until = time.monotonic() + RECHECK_S
        self._note(await self._annotate(job, json.dumps(progress, separators=(",", ":"))))

    async def _annotate(self, job: ObservedJob, progress: str | None) -> Object:
        """`progress`: None removes the annotation."""
        changes = {"metadata": {"uid": job.uid, "annotations": {PROGRESS_ANNOTATION: progress}}}
        return await self._api.merge_patch(TRAIN_JOB, job.name, changes, namespace=job.namespace)

    async def _restore_field(self, job: ObservedJob, field: Object) -> None:
        changes = {"metadata": {"uid": job.uid}, "spec": {"checkpointing": field}}
        found = await self._api.merge_patch(TRAIN_JOB, job.name, changes, namespace=job.namespace)
        if "checkpointing" not in (found.get("spec") or {}):
            self._without_field_until = time.monotonic() + RECHECK_S
        self._note(found)

    async def _pause(self, job: ObservedJob, reason: str, now: datetime) -> None:
        found = await self._api.get(TRAIN_JOB, job.name, namespace=job.namespace)
        workload = pausing.workload_of(found, await self._workloads(job.namespace))
        for patch in pausing.pause(found, workload, by=NAME, now=now, reason=reason):
            changed = await self._api.merge_patch(patch.kind, patch.name, patch.content, namespace=job.namespace)
            if patch.kind == TRAIN_JOB:
                self._note(changed)

    async def _workloads(self, namespace: str) -> list[Object]:
        for kind in (WORKLOAD, EARLIER_WORKLOAD):
            with contextlib.suppress(ObjectNotFound):
                return (await self._api.list_objects(kind, namespace=namespace))[0]
        return []


def _identity(job: ObservedJob) -> Object:
    """With the uid: a job of the same name that was created since is another one."""
    return {"name": job.name, "namespace": job.namespace, "uid": job.uid}
