"""`reprieve drill`: would the job survive a preemption?

Starts the job in a scratch folder, preempts it after a few steps, starts it again and compares. Says whether the job
survives its grace period and by how much, what took the time, and what to change. Exit 0 only if it survives. The job's
own checkpoints and a Trainer's output_dir are not touched; what the script writes elsewhere, it writes. The job's
output goes to stderr, stdout holds the report alone.

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
from reprieve.settings import resolve
from reprieve.units import format_size, parse_duration


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--grace-period", help="the grace period to survive [REPRIEVE_GRACE; else the platform's, else 30s]"
    )
    parser.add_argument("--steps", type=int, default=3, help="how many steps to train before the signal (3)")
    parser.add_argument(
        "--checkpoints", help="folder of the checkpoints, where the script leaves it open [CHECKPOINT_URI]"
    )
    parser.add_argument("--timeout", default="15m", help="how long a start, or a stop, may take (15m)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("command", nargs=REMAINDER, metavar="COMMAND…", help="the job, as for reprieve run")


def main(args: Namespace) -> int:
    if args.steps < 1:
        raise ConfigError("--steps: at least 1, or there is nothing to save")
    settings = resolve({"checkpoints": args.checkpoints, "grace_period": args.grace_period})
    known = resolve_grace_period(args.grace_period)
    period = known.period or DEFAULT_GRACE_PERIOD
    source = known.source if known.period is not None else "nothing is known of this platform: 30 s are usual"
    try:
        drill = Drill(
            parse(args.command), settings, os.environ, args.steps, parse_duration(args.timeout), print_message, _copying
        )
    except NotFound as error:
        print_message(str(error))
        return error.code
    report = drill.run(DrillReport(period.total_seconds(), source))
    talk.print()  # the job's output may have ended in the middle of a line
    if args.json:
        print_json(report.as_dict())
    else:
        _show(report)
    return 0 if report.survives else 1


_EQUAL = {True: "state equal, bit for bit", False: "STATE NOT EQUAL", None: ""}


@contextlib.contextmanager
def _copying(total: int) -> Iterator[Callable[[int], None]]:
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
        ("→ everything gone", report.exit_s, ""),
        ("in all", report.needed_s, ""),
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
    for one in report.advice:
        data.print(f"  to change: {one}")
