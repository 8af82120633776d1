"""Options of the Kubeflow SDK, as users write them."""

from __future__ import annotations

from kubeflow.trainer.options import RuntimePatch
from kubeflow.trainer.options.kubernetes import (
    JobSetSpecPatch,
    JobSetTemplatePatch,
    JobSpecPatch,
    JobTemplatePatch,
    PodSpecPatch,
    PodTemplatePatch,
    ReplicatedJobPatch,
    TrainingRuntimeSpecPatch,
)


def patch_with_volume(name: str) -> RuntimePatch:
    """Adds an empty volume to the pods of the job."""
    pod = PodTemplatePatch(spec=PodSpecPatch(volumes=[{"name": name, "emptyDir": {}}]))
    job = ReplicatedJobPatch(name="node", template=JobTemplatePatch(spec=JobSpecPatch(template=pod)))
    template = JobSetTemplatePatch(spec=JobSetSpecPatch(replicated_jobs=[job]))
    return RuntimePatch(training_runtime_spec=TrainingRuntimeSpecPatch(template=template))
