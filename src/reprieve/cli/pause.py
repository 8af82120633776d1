"""`reprieve pause`: saves a run and stops it. `reprieve resume` starts it again.

example: reprieve pause train-3f2a1b
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from rich.text import Text

from reprieve.cli.output import talk
from reprieve.errors import ConfigError
from reprieve.launch.runs.run_record import Runs
from reprieve.launcher_protocol import Pause, send_once
from reprieve.run_state import RunState

_POLL_INTERVAL_S = 0.05


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", help="the run's name; reprieve status lists them")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the run has stopped")


def main(args: Namespace) -> int:
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
