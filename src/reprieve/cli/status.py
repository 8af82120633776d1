"""`reprieve status`: shows the runs of this machine or the TrainJobs of a cluster, or one of them in full.

Goodput is the share of the time since the first start that ended up in trained steps.

examples:
  reprieve status
  reprieve status train-3f2a1b --json
  reprieve status trainjobs --namespace team
  reprieve status --watch trainjob/finetune
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from datetime import datetime, timezone
from typing import Any

from rich.table import Table
from rich.text import Text

from reprieve.cli.output import ago, data, print_json, talk
from reprieve.cli.trainjob.target import add_options, find_target
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
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="a run's name, trainjob/NAME, or trainjobs; default: all runs"
    )
    parser.add_argument("-w", "--watch", action="store_true", help="follow the TrainJob: print a line for each change")
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: Namespace) -> int:
    if (target := find_target(args.run, args, "watch")) is not None:
        from reprieve.cli.trainjob.status import show

        return show(target, args)
    runs = Runs()
    records = [runs.find(args.run)] if args.run is not None else runs.all()
    if args.json:
        shown = [as_dict(record) for record in records]
        print_json(shown[0] if args.run is not None else shown)
        return 0
    if not records:
        talk.print("no run was started here yet: reprieve run python train.py")
        return 0
    data.print(_table(records) if args.run is None else _details(records[0]))
    return 0


def as_dict(record: RunRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "state": record.state_now,
        "reason": record.reason,
        "exit_code": record.exit_code,
        "command": record.command,
        "folder": record.folder,
        "pid": record.pid if record.alive else None,
        "step": record.step,
        "done": record.done,
        "eta_s": record.eta_s if record.state_now == RunState.RUNNING else None,
        "attempts": len(record.attempts),
        "restarts": record.restarts,
        "checkpoints": record.checkpoints,
        "checkpoint_step": record.checkpoint_step,
        "checkpoint_at": _iso(record.checkpoint_at),
        "updated": _iso(record.updated),
        "time": time_spent(record.attempts, _until(record)).as_dict(),
    }


def _table(records: list[RunRecord]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "state", "step", "done", "left", "checkpoint", "restarts", "goodput"):
        table.add_column(heading, justify="left" if heading in ("run", "state", "checkpoint") else "right")
    for record in records:
        table.add_row(
            record.name,
            _state(record),
            str(record.step),
            "" if record.done is None else f"{record.done:.0%}",
            _remaining(record),
            _checkpoint(record),
            str(record.restarts),
            f"{time_spent(record.attempts, _until(record)).goodput:.0%}",
        )
    return table


def _details(record: RunRecord) -> Table:
    used = time_spent(record.attempts, _until(record))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    rows: list[tuple[str, str | Text]] = [
        ("run", record.name),
        ("state", _state(record)),
        ("command", " ".join(record.command)),
        ("folder", record.folder),
        ("step", f"{record.step}" + (f" ({record.done:.0%})" if record.done is not None else "")),
        ("left", _remaining(record)),
        ("checkpoint", _checkpoint(record)),
        ("checkpoints", record.checkpoints or ""),
        ("starts", f"{len(record.attempts)}, {record.restarts} of them after a failure"),
        ("goodput", f"{used.goodput:.1%} of {format_duration(used.wall)}"),
    ]
    rows += [(f"  lost to {cause}", format_duration(seconds)) for cause, seconds in used.lost.items()]
    for key, value in [*rows, ("exit message", record.reason)]:
        if value:
            table.add_row(key, value)
    return table


def _until(record: RunRecord) -> float:
    """Return up to when to account for time. A run without a launcher spends no more time, as it may never resume."""
    return time.time() if record.alive else record.updated


def _state(record: RunRecord) -> Text:
    return Text(record.state_now, _COLOURS.get(record.state_now, "yellow"))


def _remaining(record: RunRecord) -> str:
    return format_duration(record.eta_s) if record.eta_s is not None and record.state_now == RunState.RUNNING else ""


def _checkpoint(record: RunRecord) -> str:
    if record.checkpoint_step is None:
        return ""
    when = f", {ago(datetime.fromtimestamp(record.checkpoint_at, timezone.utc))}" if record.checkpoint_at else ""
    return f"step {record.checkpoint_step}{when}"


def _iso(at: float | None) -> str | None:
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds") if at else None
