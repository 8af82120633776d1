"""Public API for the Kubeflow SDK: a trainer whose jobs survive preemptions, and a client. See docs/kubeflow.md."""

from __future__ import annotations

from reprieve.errors import needing

with needing("reprieve.kubeflow"):
    from reprieve.sdk.client import TrainerClient
    from reprieve.sdk.trainer import PeriodicCheckpointConfig, TransformersTrainer

__all__ = ["PeriodicCheckpointConfig", "TrainerClient", "TransformersTrainer"]
