"""`reprieve drill`: rehearses a preemption and reports whether the job survives it.

Starts the job in a scratch folder, preempts it after a few steps, starts it again and compares the state. Reports
whether the job survives its grace period and by how much, what took the time, and what to change. Exit 0 only if it
survives. The job's own checkpoints and a Trainer's output_dir are not touched, but anything else that the script
writes is. The job's output goes to stderr, stdout holds only the report.

examples:
  reprieve drill --grace-period 30s python train.py
  reprieve drill --grace-period 2m --json torchrun --nproc-per-node 2 train.py
"""

from __future__ import annotations

import contextlib
import os
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from reprieve.cli.output import data, print_json, talk
from reprieve.errors import ConfigError
from reprieve.launch.command import NotFound, parse
from reprieve.launch.drill import DEFAULT_GRACE_PERIOD, Drill, DrillReport
from reprieve.launch.messages import print_message
from reprieve.preemption.deadline import resolve_grace_period
from reprieve.settings import SETTINGS, resolve
from reprieve.units import format_size, parse_duration


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--grace-period",
        metavar="DURATION",
        help="the grace period to survive [REPRIEVE_GRACE; else the platform's, else 30s]",
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=3, help="number of steps to train before the signal (3)"
    )
    parser.add_argument("--checkpoints", metavar="PATH", help=f"{SETTINGS['checkpoints'].help} [CHECKPOINT_URI]")
    parser.add_argument("--timeout", metavar="DURATION", default="15m", help="limit for each start and stop (15m)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "command", nargs=REMAINDER, metavar="COMMAND…", help="the training command, as for reprieve run"
    )


def main(args: Namespace) -> int:
    if args.steps < 1:
        raise ConfigError("--steps: use 1 or more, or there is nothing to save")
    settings = resolve({"checkpoints": args.checkpoints, "grace_period": args.grace_period})
    grace = resolve_grace_period(args.grace_period)
    period = grace.period or DEFAULT_GRACE_PERIOD
    source = grace.source if grace.period is not None else "unknown on this platform: 30 s is the usual one"
    try:
        drill = Drill(
            parse(args.command),
            settings,
            os.environ,
            args.steps,
            parse_duration(args.timeout),
            print_message,
            _show_copy,
        )
    except NotFound as error:
        print_message(str(error))
        return error.code
    report = drill.run(DrillReport(period.total_seconds(), source))
    talk.print()  # the job's output may end in the middle of a line
    if args.json:
        print_json(report.as_dict())
    else:
        _show(report)
    return 0 if report.survives else 1


_EQUAL = {True: "state equal, bit for bit", False: "STATE NOT EQUAL", None: ""}


@contextlib.contextmanager
def _show_copy(total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=talk, transient=True) as bar:
        task = bar.add_task("copying the newest checkpoint", total=total)
        yield lambda count: bar.advance(task, count)


def _show(report: DrillReport) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    size = f"{format_size(report.bytes)}" if report.bytes else ""
    ranks = f"{report.ranks} rank{'s' * (report.ranks != 1)}, step {report.step}"
    for name, seconds, note in (
        ("signal → all ranks at one step", report.agreement_s, ranks),
        ("→ durable", report.save_s, size),
        ("→ all processes ended", report.exit_s, ""),
        ("total", report.needed_s, ""),
        ("grace period", report.grace_s, report.grace_from),
        ("margin", report.margin_s, ""),
        ("next start → first step", report.restart_s, _EQUAL[report.equal]),
    ):
        table.add_row(name, f"{seconds:.2f} s", note)
    data.print(table)
    if report.compared:
        data.print(f"compared: {', '.join(report.compared)}")
    if report.survives:
        data.print(Text.assemble(("survives", "green"), f" a preemption with {report.margin_s:.1f} s to spare"))
    for problem in report.problems:
        data.print(Text.assemble(("does not survive", "red"), f": {problem}"))
    for advice in report.advice:
        data.print(f"  to change: {advice}")
