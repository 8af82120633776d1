"""The text that Prometheus scrapes."""

from __future__ import annotations

import math
import re
from typing import Any

from reprieve.progress.formats import prometheus
from reprieve.progress.snapshot import STATES, Checkpoints, Progress
from tests.support.progress_kit import AT, ODD_NAME, ODD_NUMBERS, progress

NOTHING = Progress(at=AT)


SAMPLE = re.compile(r'(reprieve_[a-z_]+)(?:\{([a-z]+)="((?:[^"\\\n]|\\["\\n])*)"\})? (\S+)')


def scraped(data: bytes) -> dict[Any, float]:
    """Parse the format strictly: HELP and TYPE once, before the samples of their name."""
    found: dict[Any, float] = {}
    described: list[str] = []
    text = data.decode()
    assert text.endswith("\n")
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            assert line.split()[2] not in described
            described.append(line.split()[2])
        elif line.startswith("# TYPE "):
            assert line.split()[2] == described[-1]
            assert line.split()[3] in ("gauge", "counter")
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            assert sample[1] == described[-1]
            label = (
                re.sub(r"\\(.)", lambda escaped: {"n": "\n"}.get(escaped[1], escaped[1]), sample[3])
                if sample[2]
                else None
            )
            key = (sample[1].removeprefix("reprieve_"), label) if sample[2] else sample[1].removeprefix("reprieve_")
            assert key not in found
            found[key] = float(sample[4])
    return found


def test_prometheus() -> None:
    saves = Checkpoints(
        latest="/c", latest_at=AT, latest_bytes=10**10, created=3, valid=2, saving=160, saving_fraction=0.5
    )
    found = scraped(prometheus.render(progress(checkpoints=saves)))
    assert {name: value for name, value in found.items() if isinstance(name, str)} == {
        "step": 150, "planned_steps": 300, "epoch": 1.5, "planned_epochs": 3, "progress_ratio": 0.5,
        "remaining_seconds": 90.4, "last_update_timestamp_seconds": AT, "loss": 0.45231, "accuracy": 0.9,
        "validation_loss": 0.5, "validation_accuracy": 0.8, "learning_rate": 5e-5, "gradient_norm": 1.25,
        "samples_per_second": 32, "tokens_per_second": 65536, "resumed_from_step": 100, "restarts_total": 2,
        "checkpoints_created_total": 3, "checkpoints_valid": 2, "latest_checkpoint_timestamp_seconds": AT,
        "latest_checkpoint_bytes": 10**10, "save_progress_ratio": 0.5,
    }  # fmt: skip
    assert {label: value for (name, label), value in _labelled(found) if name == "state"} == {
        state: float(state == "training") for state in STATES
    }
    assert found["train_metric", "learning_rate"] == 5e-5
    assert found["eval_metric", "eval_loss"] == 0.5


def test_what_is_not_known_is_not_scraped() -> None:
    found = {name for name in scraped(prometheus.render(NOTHING)) if isinstance(name, str)}
    assert found == {"step", "last_update_timestamp_seconds"}


def test_prometheus_knows_odd_numbers_and_names() -> None:
    name = ODD_NAME.replace("\udc80", "")
    found = scraped(prometheus.render(progress(train={**ODD_NUMBERS, name: 1.5}, loss=math.inf)))
    assert math.isnan(found["train_metric", "nan"])
    assert (found["train_metric", "inf"], found["train_metric", "minus"]) == (math.inf, -math.inf)
    assert (found["train_metric", name], found["loss"]) == (1.5, math.inf)
    prometheus.render(progress(train={ODD_NAME: 1.0})).decode()


def _labelled(found: dict[Any, float]) -> list[tuple[tuple[str, str], float]]:
    return [(key, value) for key, value in found.items() if isinstance(key, tuple)]
