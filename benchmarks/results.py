"""From times to results: the flat `results.json`, and the table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine, versions
from benchmarks.measure import Job, Times

_GROUPS = (
    ("Save: durable", "disk.write", "× disk"),
    ("Restore: into live tensors", "disk.read", "× disk"),
)


def best_of(prefix: str, jobs: list[Job], times: Mapping[str, Times]) -> Job | None:
    """The job with the smallest median, of those with the most rounds."""
    found = [job for job in jobs if job.is_below([prefix])]
    return min(found, key=lambda job: (-len(times[job.name].seconds), times[job.name].median), default=None)


def collect(jobs: list[Job], times: Mapping[str, Times], extra_mib: Mapping[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix in ("disk.write", "disk.read"):
        if (best := best_of(prefix, jobs, times)) is not None:
            seconds = times[best.name].median
            found |= {f"{prefix}.s": seconds, f"{prefix}.gb_s": best.bytes / seconds / 1e9, f"{prefix}.how": best.label}
    for job in jobs:
        if job.name.startswith("disk."):
            continue
        seconds = times[job.name].median
        found[job.key("s")] = seconds
        if (limit := best_of(job.limit, jobs, times)) is not None:
            found[job.key("x_disk")] = seconds / times[limit.name].median
        for name, values in times[job.name].extras.items():
            found[job.key(name)] = median(values)
    if "save.background_blocked_s" in found:
        found["save.background_blocked_x_memcpy"] = found["save.background_blocked_s"] / found["memcpy.state_s"]
    found |= extra_mib
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}


def write(path: Path, found: Mapping[str, Any], folder: Path) -> None:
    """Write the results; keys that were not measured this time stay."""
    old = json.loads(path.read_text()) if path.exists() else {}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    new = {**old, **found, "date": date, "machine": machine(folder), "versions": versions()}
    path.write_text(json.dumps(dict(sorted(new.items())), indent=2) + "\n")


def show(jobs: list[Job], times: Mapping[str, Times], found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 110)
    for title, limit_name, ratio in _GROUPS:
        rows = sorted((job for job in jobs if job.limit == limit_name), key=lambda job: times[job.name].median)
        limit = best_of(limit_name, jobs, times)
        if limit is None:
            continue
        table = Table(title=f"{title} ({limit.bytes / 1e9:.2f} GB)", title_justify="left")
        table.add_column("way")
        for column in ("seconds", "min – max", "GB/s", ratio, "extra MiB"):
            table.add_column(column, justify="right")
        for job in [limit, *rows]:
            label = f"the disk itself ({job.label})" if job is limit else job.label
            extra = found.get(job.key("extra_mib"))
            table.add_row(
                label,
                *_numbers(job, times[job.name], times[limit.name].median),
                "" if extra is None else f"{extra:,.0f}",
            )
        console.print(table)
    others = [job for job in jobs if not job.limit and not job.name.startswith("disk.")]
    if others:
        table = Table("what", "seconds", "min – max", title="Other", title_justify="left")
        for job in others:
            table.add_row(job.label or job.name, *_numbers(job, times[job.name], 1)[:2])
        if "save.background_blocked_s" in found:
            blocked = times["save.background"].extras["blocked_s"]
            ratio_text = (
                f"{found['save.background_blocked_s']:.3f} (× memcpy {found['save.background_blocked_x_memcpy']:.2f})"
            )
            table.add_row("background save: training blocked", ratio_text, f"{min(blocked):.3f} – {max(blocked):.3f}")
        console.print(table)


def _numbers(job: Job, times: Times, limit_s: float) -> tuple[str, str, str, str]:
    speed = f"{job.bytes / times.median / 1e9:.2f}" if job.bytes else ""
    spread = f"{min(times.seconds):.3f} – {max(times.seconds):.3f}"
    return f"{times.median:.3f}", spread, speed, f"{times.median / limit_s:.2f}"
