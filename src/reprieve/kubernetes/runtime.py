"""The parts of a training runtime that matter to a protected TrainJob.

Read from a ClusterTrainingRuntime or a TrainingRuntime. What a job asks for must fit it: its grace period, its mounts,
its command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from reprieve.exit_codes import PREEMPTED
from reprieve.kubernetes.names import ANCESTOR_LABEL, TRAINER_CONTAINER, TRAINER_JOB

Object = dict[str, Any]

DEFAULT_GRACE_PERIOD = timedelta(seconds=30)
"""Kubernetes' own."""
_MAX_GRACE_PERIOD_S = 10**9
"""Kubernetes takes any 64-bit number, a timedelta does not."""


@dataclass(frozen=True, slots=True)
class RuntimeReference:
    """Which runtime a TrainJob names."""

    kind: str
    name: str
    namespace: str
    """Empty for a ClusterTrainingRuntime."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime, as stored."""

    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(_at(self.content, "metadata").get("name", ""))

    @property
    def trainer_job(self) -> str:
        """The name of the replicated job that trains."""
        return str(self._replicated_job.get("name", TRAINER_JOB))

    @property
    def command(self) -> list[str]:
        return [str(word) for word in self._container.get("command") or ()]

    @property
    def args(self) -> list[str]:
        return [str(word) for word in self._container.get("args") or ()]

    @property
    def nodes(self) -> int:
        return int(_at(self.content, "spec", "mlPolicy").get("numNodes") or 1)

    @property
    def environment(self) -> set[str]:
        """The names of the variables of the training container."""
        return {str(variable.get("name")) for variable in self._container.get("env") or ()}

    @property
    def grace_period(self) -> timedelta:
        seconds = grace_period_of(self._pod)
        return DEFAULT_GRACE_PERIOD if seconds is None else seconds

    @property
    def volumes(self) -> list[Object]:
        return list(self._pod.get("volumes") or ())

    @property
    def mounts(self) -> list[Object]:
        return list(self._container.get("volumeMounts") or ())

    @property
    def restarts_preempted_jobs(self) -> bool:
        """Whether a preemption fails the Job at once, and JobSet then restarts all pods without counting it."""
        job_rules = _at(self._job, "podFailurePolicy").get("rules") or ()
        by_code = any(PREEMPTED in (_at(rule, "onExitCodes").get("values") or ()) for rule in job_rules)
        rules = _at(self._job_set, "failurePolicy").get("rules") or ()
        return by_code and any(rule.get("action") == "RestartJobSetAndIgnoreMaxRestarts" for rule in rules)

    @property
    def _job_set(self) -> Object:
        return _at(self.content, "spec", "template", "spec")

    @property
    def _replicated_job(self) -> Object:
        jobs: list[Object] = self._job_set.get("replicatedJobs") or []
        labelled = [job for job in jobs if _at(job, "template", "metadata", "labels").get(ANCESTOR_LABEL) == "trainer"]
        return next(iter([*labelled, *(job for job in jobs if job.get("name") == TRAINER_JOB)]), {})

    @property
    def _job(self) -> Object:
        return _at(self._replicated_job, "template", "spec")

    @property
    def _pod(self) -> Object:
        return _at(self._job, "template", "spec")

    @property
    def _container(self) -> Object:
        containers = self._pod.get("containers") or ()
        return next((each for each in containers if each.get("name") == TRAINER_CONTAINER), {})


def patched_pods(patches: object, trainer_job: str) -> Iterator[Object]:
    """Return the pods that the `runtimePatches` of a TrainJob describe, of the replicated job that trains."""
    for patch in patches if isinstance(patches, list) else ():
        for job in _at(patch, "trainingRuntimeSpec", "template", "spec").get("replicatedJobs") or ():
            if job.get("name") == trainer_job:
                yield _at(job, "template", "spec", "template", "spec")


def grace_period_of(pod: Mapping[str, Any]) -> timedelta | None:
    seconds = pod.get("terminationGracePeriodSeconds")
    return None if seconds is None else timedelta(seconds=min(int(seconds), _MAX_GRACE_PERIOD_S))


def _at(content: object, *path: str) -> Object:
    """Return a part of an object; an empty one where it is missing or of another type."""
    for name in path:
        content = content.get(name) if isinstance(content, Mapping) else None
    return dict(content) if isinstance(content, Mapping) else {}
