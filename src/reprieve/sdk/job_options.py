"""The option that turns the job of a `TransformersTrainer` into one that survives preemptions on Kubernetes.

    the user's options → JobOptions → the Kubeflow SDK makes the TrainJob → (admission, where the operator runs)

It adds what admission adds (`kubernetes/train_job.py`), so that a cluster without the operator protects the job as
well; admission finds all of it there and leaves it as it is. Variables that Kubernetes fills in are the exception: the
SDK passes on plain values only.
"""

from __future__ import annotations

import logging
import random
import string
import uuid
from dataclasses import dataclass
from typing import Any

from reprieve.errors import ConfigError
from reprieve.kubernetes.checkpointing import Checkpointing
from reprieve.kubernetes.names import CHECKPOINTING_ANNOTATION, CREDENTIALS_PATH
from reprieve.kubernetes.runtime import Runtime
from reprieve.kubernetes.train_job import label_pods, protect
from reprieve.sdk.command import command_of
from reprieve.sdk.trainer import METRICS_PORT, TransformersTrainer

log = logging.getLogger("reprieve")

Object = dict[str, Any]

TRACKING_ANNOTATION = "trainer.opendatahub.io/progression-tracking"
PORT_ANNOTATION = "trainer.opendatahub.io/metrics-port"
POLL_INTERVAL_ANNOTATION = "trainer.opendatahub.io/metrics-poll-interval"
CREDENTIALS_VARIABLE = "REPRIEVE_CREDENTIALS_DIR"


@dataclass(frozen=True)
class JobOptions:
    """An option of `TrainerClient.train`. It must be the last one: those of the SDK replace annotations and labels."""

    trainer: TransformersTrainer
    runtime_name: str
    runtime: Runtime | None
    """None: it could not be read."""

    def __call__(self, job_spec: Object, trainer: Any, backend: object) -> None:
        """Change the job. `trainer` is what the SDK submits: a CustomTrainer of our own, whose env is replaced."""
        metadata, spec = job_spec.setdefault("metadata", {}), job_spec.setdefault("spec", {})
        name = metadata.get("name") or new_name()
        request = self.trainer.request(run=f"{name[:80]}-{uuid.uuid4().hex[:8]}")
        env = {**(trainer.env or {}), **self._environment()}
        job = {
            "metadata": {**metadata, "name": name},
            "spec": {
                **spec,
                "runtimeRef": {"name": self.runtime_name},
                "trainer": {
                    "command": command_of(request),
                    "numNodes": self.trainer.num_nodes,
                    "env": [{"name": key, "value": value} for key, value in env.items()],
                },
            },
        }
        settings = self.trainer.settings()
        if settings is None:
            found = label_pods(job, self.runtime, secret=self.trainer.data_connection_name or "")
        else:
            found = self._protected(job, settings)
        metadata |= found["metadata"]
        metadata["annotations"] = {**(metadata.get("annotations") or {}), **self._annotations()}
        spec["runtimePatches"] = found["spec"]["runtimePatches"]
        spec["trainer"] = {**(spec.get("trainer") or {}), "command": found["spec"]["trainer"]["command"]}
        # An empty value is none: Kueue leaves it out when it starts a job, and the trainer of a job may not change.
        variables = [each for each in found["spec"]["trainer"]["env"] if "valueFrom" not in each]
        trainer.env = {each["name"]: each.get("value") or None for each in variables}

    def _protected(self, job: Object, settings: Checkpointing) -> Object:
        folder = self.trainer.output_dir
        if folder is not None and not settings.uri:
            raise ConfigError(
                f"output_dir={folder!r} is below the current folder or the home of a pod, and is lost with the pod: "
                f"write 'pvc://CLAIM/{folder.strip('~./')}', or the whole path of a folder in a volume of the runtime"
            )
        found = protect(job, settings, self.runtime)
        for warning in found.warnings:
            log.warning("%s", warning.removeprefix("reprieve: "))
        if not settings.uri:
            # The settings of a TrainJob name a folder, and here only the script knows it.
            del found.job["metadata"]["annotations"][CHECKPOINTING_ANNOTATION]
            log.warning(
                "checkpoints go to the script's own output_dir: if that is in no volume, they are lost with the pod. "
                "Write output_dir='pvc://CLAIM/FOLDER'"
            )
        return found.job

    def _annotations(self) -> dict[str, str]:
        """Red Hat's, with which their controller polls the pods and their dashboard shows the progress."""
        if not self.trainer.enable_progression_tracking:
            return {}
        return {
            TRACKING_ANNOTATION: "true",
            PORT_ANNOTATION: str(self.trainer.metrics_port),
            POLL_INTERVAL_ANNOTATION: str(self.trainer.metrics_poll_interval_seconds),
        }

    def _environment(self) -> dict[str, str]:
        is_served = self.trainer.enable_progression_tracking
        found = {METRICS_PORT: str(self.trainer.metrics_port) if is_served else "off"}
        return found | ({CREDENTIALS_VARIABLE: CREDENTIALS_PATH} if self.trainer.data_connection_name else {})


def new_name() -> str:
    """As the SDK names jobs."""
    return random.choice(string.ascii_lowercase) + uuid.uuid4().hex[:11]  # noqa: S311 - no secret
