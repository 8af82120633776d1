"""`reprieve pause`: saves a run or a TrainJob and stops it. `reprieve resume` starts it again.

A TrainJob is suspended, or where Kueue admits it, its Workload is deactivated. The command waits until all pods have
stopped, and exits with 1 if the last step could not be saved.

examples:
  reprieve pause train-3f2a1b
  reprieve pause trainjob/finetune --reason 'night rates' --namespace team
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from rich.text import Text

from reprieve.cli.output import talk
from reprieve.cli.trainjob.target import add_options, find_job
from reprieve.errors import ConfigError
from reprieve.launch.runs.run_record import Runs
from reprieve.launcher_protocol import Pause, send_once
from reprieve.run_state import RunState

_POLL_INTERVAL_S = 0.05


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's name, or trainjob/NAME; reprieve status lists them")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the run has stopped")
    add_options(parser)
    parser.add_argument("--reason", metavar="TEXT", help="why the TrainJob is paused, for others who see it")
    parser.add_argument(
        "--timeout", metavar="DURATION", help="how long to wait for the pods of a TrainJob [their grace period and 60s]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (a TrainJob)")


def main(args: Namespace) -> int:
    if (target := find_job(args.run, args, "reason", "timeout", "json")) is not None:
        from reprieve.cli.trainjob import verbs

        return verbs.pause(target, args)
    run: str = args.run
    runs = Runs()
    record = runs.find(run)
    if not record.alive:
        raise ConfigError(f"{run} is not running: {record.state_now}")
    if not send_once(Pause(), record.socket):
        raise ConfigError(
            f"{run} does not respond (its launcher has pid {record.pid}): kill -TERM {record.pid} stops it, too"
        )
    if args.no_wait:
        return 0
    with talk.status(Text(f"{run} is saving …")):
        while record.alive:
            time.sleep(_POLL_INTERVAL_S)
            record = runs.find(run)
    record = runs.find(run)
    talk.print(
        f"{record.reason}. Resume it with: reprieve resume {run}" if record.state == RunState.PAUSED else record.reason
    )
    return 0 if record.state == RunState.PAUSED else 1
