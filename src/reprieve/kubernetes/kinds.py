"""The kinds of objects that Reprieve reads or writes, as the API server addresses them.

Objects themselves are plain dictionaries. This module needs no client, so that each of them can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reprieve.kubernetes.names import TRAIN_JOB_GROUP

Object = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of objects, as the API server addresses it."""

    group: str
    version: str
    name: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


@dataclass(frozen=True)
class Event:
    """A change that a watch reports: `ADDED`, `MODIFIED` or `DELETED`, and the object."""

    type: str
    object: Object


SECRET = Kind("", "v1", "Secret", "secrets")
POD = Kind("", "v1", "Pod", "pods")
EVENT = Kind("", "v1", "Event", "events")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
CUSTOM_RESOURCE_DEFINITION = Kind(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)
MUTATING_WEBHOOK_CONFIGURATION = Kind(
    "admissionregistration.k8s.io",
    "v1",
    "MutatingWebhookConfiguration",
    "mutatingwebhookconfigurations",
    namespaced=False,
)
TRAIN_JOB = Kind(TRAIN_JOB_GROUP, "v1alpha1", "TrainJob", "trainjobs")
TRAINING_RUNTIME = Kind(TRAIN_JOB_GROUP, "v1alpha1", "TrainingRuntime", "trainingruntimes")
CLUSTER_TRAINING_RUNTIME = Kind(
    TRAIN_JOB_GROUP, "v1alpha1", "ClusterTrainingRuntime", "clustertrainingruntimes", namespaced=False
)
WORKLOAD = Kind("kueue.x-k8s.io", "v1beta2", "Workload", "workloads")
EARLIER_WORKLOAD = Kind("kueue.x-k8s.io", "v1beta1", "Workload", "workloads")
"""Kueue before 0.15 serves only this version."""
