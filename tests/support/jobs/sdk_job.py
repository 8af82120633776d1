"""Submits a TrainJob with the Kubeflow SDK, as a notebook does: `python sdk_job.py NAMESPACE`."""

from __future__ import annotations

import sys

from kubeflow.trainer import CustomTrainer, KubernetesBackendConfig, TrainerClient
from kubeflow.trainer.options import Annotations


def train() -> None:
    print("training")


if __name__ == "__main__":
    client = TrainerClient(KubernetesBackendConfig(namespace=sys.argv[1]))
    settings = "storage: {uri: 'pvc://shared/run'}"
    client.train(
        runtime=client.get_runtime("reprieve-torch"),
        trainer=CustomTrainer(func=train, num_nodes=2),
        options=[Annotations({"reprieve.dev/checkpointing": settings})],
    )
