"""Runs on Ray Train: from SIGTERM to the committed checkpoint, and what is lost, beside Ray's own behaviour.

A run of two workers on a local cluster; rank 1 gets SIGTERM between two periodic checkpoints, several times. The time
of the function's own save is taken off: what remains is agreement, upload and commit. Without Reprieve, every stop
counts as a failure, and the run goes back to its last periodic checkpoint.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEER = "ray"
STOPS = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """What rank 0 saw in one run."""

    commit_s: list[float]
    """From SIGTERM to the commit, without the function's own save."""
    steps_lost: list[int]
    """For each stop: steps that the run did a second time."""
    failures: int
    """How often Ray saw a worker fail."""
    step_us: float | None
    """CPU time that a step costs."""
    background_us: float | None
    """CPU time of our threads in a second."""


def run(folder: Path, stops: int, *, plain: bool) -> Seen:
    """Run the job to its end."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.ray_job", str(folder), str(stops), str(int(plain))]
    # Its memory monitor would kill workers, and so count failures, for the memory that other processes take.
    subprocess.run(command, check=True, timeout=900, env={**os.environ, "RAY_memory_monitor_refresh_ms": "0"})
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    commits = [
        line["committed"] - float((folder / f"signal-{line['stop']}").read_text()) - line["save_s"]
        for line in lines
        if "committed" in line
    ]
    lost, last = [], 0
    for line in lines:
        if "started" in line and last:
            lost.append(last + 1 - line["started"])
        last = line.get("step", last)
    failures = folder / "failures"
    return Seen(
        commits,
        lost,
        len(failures.read_text().splitlines()) if failures.exists() else 0,
        next((line["step_us"] for line in lines if "step_us" in line), None),
        next((line["background_us"] for line in lines if "background_us" in line), None),
    )


def figures(folder: Path) -> dict[str, float]:
    ours = run(folder / "ray-ours", STOPS, plain=False)
    theirs = run(folder / "ray-plain", STOPS, plain=True)
    assert ours.step_us is not None and ours.background_us is not None
    return {
        "ray.commit_ms": round(1000 * statistics.median(ours.commit_s), 1),
        "ray.commit_ms_max": round(1000 * max(ours.commit_s), 1),
        "ray.steps_lost": sum(ours.steps_lost),
        "ray.failures": ours.failures,
        "ray.step_us": round(ours.step_us, 2),
        "ray.background_us_per_s": round(ours.background_us, 1),
        "ray.stops": STOPS,
        f"peers.{PEER}.steps_lost": sum(theirs.steps_lost),
        f"peers.{PEER}.failures": theirs.failures,
    }


def show(found: dict[str, float]) -> None:
    print(
        f"Ray: SIGTERM to a worker until the checkpoint is committed, without the save itself: "
        f"{found['ray.commit_ms']:.0f} ms (at most {found['ray.commit_ms_max']:.0f})\n"
        f"     {found['ray.stops']} stops: {found['ray.steps_lost']} steps lost, {found['ray.failures']} failures; "
        f"Ray alone: {found[f'peers.{PEER}.steps_lost']} steps, {found[f'peers.{PEER}.failures']} failures\n"
        f"     a step: {found['ray.step_us']:.1f} µs; our threads: {found['ray.background_us_per_s']:.0f} µs a second"
    )
