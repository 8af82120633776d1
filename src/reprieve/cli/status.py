"""`reprieve status`: the runs of this machine, or one of them in full.

Goodput is the part of the time since the first start in which the run trained and kept what it did.

examples:
  reprieve status
  reprieve status train-3f2a1b --json
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from datetime import datetime, timezone
from typing import Any

from rich.table import Table
from rich.text import Text

from reprieve.cli.output import ago, data, print_json, talk
from reprieve.launch.runs.goodput import time_spent
from reprieve.launch.runs.run_record import RunRecord, Runs
from reprieve.run_state import RunState
from reprieve.units import format_duration

_COLOURS = {
    RunState.FINISHED: "green",
    RunState.RUNNING: "green",
    RunState.FAILED: "red",
    RunState.HUNG: "red",
    RunState.LOST: "red",
}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="a run's name; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: Namespace) -> int:
    runs = Runs()
    found = [runs.find(args.run)] if args.run is not None else runs.all()
    if args.json:
        shown = [as_dict(one) for one in found]
        print_json(shown[0] if args.run is not None else shown)
        return 0
    if not found:
        talk.print("no run was started here yet: reprieve run python train.py")
        return 0
    data.print(_all(found) if args.run is None else _one(found[0]))
    return 0


def as_dict(one: RunRecord) -> dict[str, Any]:
    return {
        "name": one.name,
        "state": one.state_now,
        "reason": one.reason,
        "exit_code": one.exit_code,
        "command": one.command,
        "folder": one.folder,
        "pid": one.pid if one.alive else None,
        "step": one.step,
        "done": one.done,
        "eta_s": one.eta_s if one.state_now == RunState.RUNNING else None,
        "attempts": len(one.attempts),
        "restarts": one.restarts,
        "checkpoints": one.checkpoints,
        "checkpoint_step": one.checkpoint_step,
        "checkpoint_at": _iso(one.checkpoint_at),
        "updated": _iso(one.updated),
        "time": time_spent(one.attempts, _until(one)).as_dict(),
    }


def _all(found: list[RunRecord]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "state", "step", "done", "left", "checkpoint", "restarts", "goodput"):
        table.add_column(heading, justify="left" if heading in ("run", "state", "checkpoint") else "right")
    for one in found:
        table.add_row(
            one.name,
            _state(one),
            str(one.step),
            "" if one.done is None else f"{one.done:.0%}",
            _left(one),
            _checkpoint(one),
            str(one.restarts),
            f"{time_spent(one.attempts, _until(one)).goodput:.0%}",
        )
    return table


def _one(one: RunRecord) -> Table:
    used = time_spent(one.attempts, _until(one))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    rows: list[tuple[str, str | Text]] = [
        ("run", one.name),
        ("state", _state(one)),
        ("command", " ".join(one.command)),
        ("folder", one.folder),
        ("step", f"{one.step}" + (f" ({one.done:.0%})" if one.done is not None else "")),
        ("left", _left(one)),
        ("checkpoint", _checkpoint(one)),
        ("checkpoints", one.checkpoints or ""),
        ("starts", f"{len(one.attempts)}, {one.restarts} of them after a failure"),
        ("goodput", f"{used.goodput:.1%} of {format_duration(used.wall)}"),
    ]
    rows += [(f"  lost to {cause}", format_duration(seconds)) for cause, seconds in used.lost.items()]
    for key, value in [*rows, ("last words", one.reason)]:
        if value:
            table.add_row(key, value)
    return table


def _until(one: RunRecord) -> float:
    """A run whose launcher is gone spends no more time: it was stopped, and nobody has said that it will go on."""
    return time.time() if one.alive else one.updated


def _state(one: RunRecord) -> Text:
    return Text(one.state_now, _COLOURS.get(one.state_now, "yellow"))


def _left(one: RunRecord) -> str:
    return format_duration(one.eta_s) if one.eta_s is not None and one.state_now == RunState.RUNNING else ""


def _checkpoint(one: RunRecord) -> str:
    if one.checkpoint_step is None:
        return ""
    when = f", {ago(datetime.fromtimestamp(one.checkpoint_at, timezone.utc))}" if one.checkpoint_at else ""
    return f"step {one.checkpoint_step}{when}"


def _iso(moment: float | None) -> str | None:
    return datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="milliseconds") if moment else None
