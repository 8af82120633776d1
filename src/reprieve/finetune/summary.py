"""What a finished job reports: losses, tokens per second, interruptions, and the time that these have cost.

Losses and tokens are in the trainer's log, which continues over all attempts. Interruptions and lost time are in the
record of attempts that `reprieve run` keeps beside the checkpoints. Without it, the newest checkpoint counts starts.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reprieve.checkpoint.folder import attempts
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.finetune.loss_curve import draw_png, draw_text
from reprieve.launch.runs.goodput import FIRST_START, time_spent
from reprieve.run_state import RunState
from reprieve.storage.disk import Disk
from reprieve.units import format_duration

JSON_FILE, PNG_FILE = "summary.json", "loss.png"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """How often a job was interrupted."""

    count: int
    lost_s: dict[str, float] | None = None
    """Seconds that were lost, by cause. None: nothing recorded them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a finished job reports."""

    steps: int
    epochs: float
    losses: list[tuple[int, float]]
    """The mean loss since the line before, at the step of each log line."""
    evaluations: list[tuple[int, float]]
    tokens: int | None
    """Tokens that were trained on, of all ranks, padding left out."""
    training_s: float | None
    """Seconds of training, over all attempts, without what was lost."""
    tokens_per_s: float | None
    interruptions: int
    lost_s: dict[str, float] | None = field(default=None)
    version: int = VERSION


def summarize(log: Sequence[Mapping[str, Any]], steps: int, epochs: float, interruptions: Interruptions) -> Summary:
    """Return the summary of a job. `log`: the trainer's log history."""
    tokens = next((int(line["num_tokens"]) for line in reversed(log) if line.get("num_tokens")), None)
    seconds = next((float(line["train_runtime"]) for line in reversed(log) if "train_runtime" in line), None)
    return Summary(
        steps=steps,
        epochs=epochs,
        losses=[(int(line["step"]), float(line["loss"])) for line in log if "loss" in line],
        evaluations=[(int(line["step"]), float(line["eval_loss"])) for line in log if "eval_loss" in line],
        tokens=tokens,
        training_s=seconds,
        tokens_per_s=tokens / seconds if tokens and seconds else None,
        interruptions=interruptions.count,
        lost_s=interruptions.lost_s,
    )


def count_interruptions(checkpoints: Path, now: float | None = None) -> Interruptions:
    """Return how often the job with these checkpoints was interrupted, from what is recorded there."""
    recorded = attempts.read(checkpoints)
    if recorded:
        lost = time_spent(recorded, time.time() if now is None else now).lost
        lost_s = {
            str(cause): seconds for cause, seconds in lost.items() if cause not in (FIRST_START, RunState.RUNNING)
        }
        ended = [attempt for attempt in recorded if attempt.cause not in (RunState.RUNNING, RunState.FINISHED)]
        return Interruptions(count=len(ended), lost_s=lost_s)
    with contextlib.suppress(OSError):
        for checkpoint in list_checkpoints(checkpoints):
            if checkpoint.manifest is not None:
                return Interruptions(count=checkpoint.manifest.attempt - 1)
    return Interruptions(count=0)


def lines(summary: Summary) -> list[str]:
    """Return the summary as text."""
    found = draw_text(summary.losses)
    shown = [f"{summary.steps} steps, {summary.epochs:g} epochs"]
    if summary.losses:
        shown.append(f"loss {summary.losses[0][1]:.4g} → {summary.losses[-1][1]:.4g}")
    if summary.evaluations:
        shown.append(f"evaluation {summary.evaluations[-1][1]:.4g}")
    if summary.tokens is not None and summary.tokens_per_s is not None:
        shown.append(f"{summary.tokens:,} tokens, {summary.tokens_per_s:,.0f} a second")
    found.append("; ".join(shown))
    times = f"{summary.interruptions} interruption{'s' * (summary.interruptions != 1)} survived"
    if summary.lost_s is not None:
        found.append(f"{times}, {format_duration(float(sum(summary.lost_s.values())))} lost")
    elif summary.interruptions:
        found.append(f"{times}; `reprieve run` also records the time that they cost")
    else:
        found.append("no interruptions")
    return found


def write(summary: Summary, output: Path) -> None:
    """Write the summary as JSON, and its losses as a picture."""
    disk = Disk()
    disk.replace_file(output / JSON_FILE, json.dumps(asdict(summary), indent=1).encode() + b"\n", flush_folder=False)
    if summary.losses:
        disk.replace_file(output / PNG_FILE, draw_png(summary.losses, summary.evaluations), flush_folder=False)
