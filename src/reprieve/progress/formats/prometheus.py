"""Progress in Prometheus' text format 0.0.4, in seconds, bytes and ratios.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from reprieve.progress.snapshot import STATES, Progress

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGE, COUNTER = "gauge", "counter"


def render(progress: Progress) -> bytes:
    """Render the metrics. Unknown values are left out."""
    checkpoints = progress.checkpoints
    lines: list[str] = []
    for name, kind, text, value in (
        ("step", GAUGE, "Completed optimizer steps, those before a resume included.", progress.step),
        ("planned_steps", GAUGE, "Optimizer steps of the whole run.", progress.total_steps),
        ("epoch", GAUGE, "Completed epochs, with a fraction.", progress.epoch),
        ("planned_epochs", GAUGE, "Epochs of the whole run.", progress.total_epochs),
        ("progress_ratio", GAUGE, "Completed fraction of the run, 0 to 1.", _share(progress.percent)),
        ("remaining_seconds", GAUGE, "Estimated time until the run is finished.", progress.eta_s),
        ("last_update_timestamp_seconds", GAUGE, "When training last reported anything.", progress.at),
        ("loss", GAUGE, "Training loss.", progress.loss),
        ("accuracy", GAUGE, "Training accuracy.", progress.accuracy),
        ("validation_loss", GAUGE, "Loss of the last evaluation.", progress.validation_loss),
        ("validation_accuracy", GAUGE, "Accuracy of the last evaluation.", progress.validation_accuracy),
        ("learning_rate", GAUGE, "Learning rate.", progress.learning_rate),
        ("gradient_norm", GAUGE, "Norm of the gradients.", progress.gradient_norm),
        ("samples_per_second", GAUGE, "Samples trained on per second, excluding pauses.", progress.samples_per_s),
        ("tokens_per_second", GAUGE, "Tokens trained on per second, excluding pauses.", progress.tokens_per_s),
        ("resumed_from_step", GAUGE, "The step that this session resumed from.", progress.resumed_from),
        ("restarts_total", COUNTER, "How often the run was restarted.", progress.restarts),
        ("checkpoints_created_total", COUNTER, "Checkpoints that became durable.", checkpoints.created),
        ("checkpoints_valid", GAUGE, "Valid checkpoints.", checkpoints.valid),
        (
            "latest_checkpoint_timestamp_seconds",
            GAUGE,
            "When the newest checkpoint became durable.",
            checkpoints.latest_at,
        ),
        ("latest_checkpoint_bytes", GAUGE, "Size of the newest checkpoint.", checkpoints.latest_bytes),
        (
            "save_progress_ratio",
            GAUGE,
            "Written fraction of the save in progress, 0 to 1.",
            checkpoints.saving_fraction,
        ),
    ):
        if value is not None:
            lines += family(f"reprieve_{name}", kind, text, {"": value})
    states = {labels(state=state): float(state == progress.state) for state in STATES}
    lines += family("reprieve_state", GAUGE, "1 for the current state of the run.", states)
    for name, text, metrics in (
        ("train_metric", "Values that training logged, by name.", progress.train),
        ("eval_metric", "Values of the last evaluation, by name.", progress.evaluation),
    ):
        if metrics:
            lines += family(
                f"reprieve_{name}", GAUGE, text, {labels(name=key): value for key, value in metrics.items()}
            )
    return ("\n".join(lines) + "\n").encode(errors="replace")


def family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> list[str]:
    """Return the lines of one metric. `samples`: by their labels."""
    return [
        f"# HELP {name} {text}",
        f"# TYPE {name} {kind}",
        *(f"{name}{each} {_number(value)}" for each, value in samples.items()),
    ]


def _number(value: float) -> str:
    """Format for Go's ParseFloat."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def labels(**values: str) -> str:
    """Return labels as a sample has them: `{namespace="team",trainjob="train"}`."""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items()) + "}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
