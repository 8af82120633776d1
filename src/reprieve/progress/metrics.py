"""Logged numbers as plain Python, and which of them everybody means by "the loss"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LARGE = 2**63
"""Whole numbers up to here stay whole: counts. Those who read JSON expect no larger ones."""

TRAIN: Mapping[str, tuple[str, ...]] = {
    "loss": ("loss", "train_loss"),
    "accuracy": ("accuracy", "mean_token_accuracy", "train_accuracy"),
    "learning_rate": ("learning_rate", "lr"),
    "gradient_norm": ("grad_norm", "gradient_norm"),
}
"""By what names they are logged: Transformers' and TRL's first."""
EVALUATION: Mapping[str, tuple[str, ...]] = {
    "validation_loss": ("eval_loss", "validation_loss", "val_loss"),
    "validation_accuracy": ("eval_accuracy", "eval_mean_token_accuracy", "validation_accuracy", "val_accuracy"),
}
_OF_EVALUATIONS = ("eval_", "validation_", "val_")


def by_origin(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of training, and those of evaluations."""
    evaluation = {name: value for name, value in metrics.items() if str(name).startswith(_OF_EVALUATIONS)}
    return {name: value for name, value in metrics.items() if name not in evaluation}, evaluation


def detached(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """As given, but a loss does not keep the graph that it was computed by."""
    return {name: value.detach() if hasattr(value, "detach") else value for name, value in metrics.items()}


def plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Every value that is one number: of Python, NumPy or torch. What is none is left out."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = value if type(value) is int and abs(value) < _LARGE else float(value)
        except Exception:  # noqa: BLE001, S112 - it is somebody else's object, and no reason to tell nothing
            continue
    return found


def named(names: Mapping[str, tuple[str, ...]], metrics: Mapping[str, float]) -> dict[str, float]:
    """The well-known ones of them, by our names."""
    return {
        ours: metrics[next(one for one in theirs if one in metrics)]
        for ours, theirs in names.items()
        if any(one in metrics for one in theirs)
    }
