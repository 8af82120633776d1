"""Converts logged values to plain numbers, and finds the well-known ones among them, such as the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_INT = 2**63
"""Integers below this stay integers: readers of JSON do not expect larger ones."""

TRAIN: Mapping[str, tuple[str, ...]] = {
    "loss": ("loss", "train_loss"),
    "accuracy": ("accuracy", "mean_token_accuracy", "train_accuracy"),
    "learning_rate": ("learning_rate", "lr"),
    "gradient_norm": ("grad_norm", "gradient_norm"),
}
"""The names under which they are logged, those of Transformers and TRL first."""
EVALUATION: Mapping[str, tuple[str, ...]] = {
    "validation_loss": ("eval_loss", "validation_loss", "val_loss"),
    "validation_accuracy": ("eval_accuracy", "eval_mean_token_accuracy", "validation_accuracy", "val_accuracy"),
}
_EVALUATION_PREFIXES = ("eval_", "validation_", "val_")


def by_origin(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the metrics of training from those of evaluations."""
    evaluation = {name: value for name, value in metrics.items() if str(name).startswith(_EVALUATION_PREFIXES)}
    return {name: value for name, value in metrics.items() if name not in evaluation}, evaluation


def detached(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Detach tensors, so that a loss does not keep its graph alive."""
    return {name: value.detach() if hasattr(value, "detach") else value for name, value in metrics.items()}


def plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return all values that are a single number of Python, NumPy or torch. Others are left out."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = value if type(value) is int and abs(value) < _MAX_INT else float(value)
        except Exception:  # noqa: BLE001, S112 - a foreign object; the other values still count
            continue
    return found


def named(names: Mapping[str, tuple[str, ...]], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the well-known metrics by Reprieve's names."""
    return {
        name: metrics[next(logged for logged in logged_names if logged in metrics)]
        for name, logged_names in names.items()
        if any(logged in metrics for logged in logged_names)
    }
