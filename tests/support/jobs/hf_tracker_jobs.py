"""Jobs that TensorBoard, W&B and MLflow track, and readers of what these have recorded."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.jobs.hf_jobs import HfJob, train

Curve = list[tuple[int, float]]
"""Steps and losses, in the order of writing."""


def train_and_begin_another(job: HfJob) -> None:
    """Train, then start another W&B run."""
    import wandb

    train(job)
    wandb.finish()
    wandb.init(project="another").finish()


def train_in_own_runs(job: HfJob) -> None:
    """Train in runs that the script starts itself, without an ID."""
    import mlflow
    import wandb

    with wandb.init(), mlflow.start_run():
        train(job)


def on_tensorboard(root: str) -> dict[str, Curve]:
    """Return the losses by folder."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, Curve] = defaultdict(list)
    for path in sorted(Path(root).rglob("events.out.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "train/loss":
                    found[path.parent.name].append((event.step, value.tensor.float_val[0]))
    return dict(found)


def on_wandb(root: str) -> dict[str, list[Curve]]:
    """Return, by run, what each process that took part in it has written."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[Curve]] = defaultdict(list)
    for path in sorted(Path(root).glob("wandb/offline-run-*/run-*.wandb")):
        curve: Curve = []
        run = ""
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            run = record.run.run_id or run
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in values:
                curve.append((int(values["train/global_step"]), float(values["train/loss"])))
        found[run].append(curve)
    return dict(found)


def _records(file: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log: blocks of 32 KiB with parts of records (checksum, length, kind of part)."""
    at, whole = 7, b""
    while at + 7 <= len(file):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", file, at)
        whole += file[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # the only part, or the last
            yield whole
            whole = b""


def on_mlflow(uri: str) -> dict[str, tuple[str, Curve]]:
    """Return the status and the losses by run."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    return {
        run.info.run_id: (
            run.info.status,
            [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")],
        )
        for run in client.search_runs(["0"])
    }
