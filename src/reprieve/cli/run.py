"""`reprieve run`: a training command, looked after.

COMMAND is what you type today: python train.py …, train.py …, torchrun …, accelerate launch …, deepspeed …. Our
options come before it; each can also be given by the variable in brackets.

exit codes:
  0     training finished
  143   stopped (SIGTERM, reprieve pause, a cloud's notice) and saved: started again, it goes on exactly there
  42    it will not work without a person: a wrong setting, nothing valid to resume from, another model's checkpoint
  else  the command's own

examples:
  reprieve run python train.py --epochs 3
  reprieve run --every 10m --max-restarts 5 torchrun --nproc-per-node 2 train.py
  reprieve run --explain --grace-period 2m train.py
"""

from __future__ import annotations

import logging
import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from reprieve.errors import ConfigError
from reprieve.launch.command import NotFound, parse
from reprieve.launch.launcher import Launcher
from reprieve.launch.messages import say
from reprieve.launch.runs.run_record import Runs, check_name
from reprieve.settings import KINDS, Settings, resolve

_OPTIONS = {
    "checkpoints": "folder of the checkpoints, where the script leaves it open",
    "every": "how often to save: 500 (steps), epoch, 10m, never, or auto: by what a save costs and what interrupts",
    "keep": "how many checkpoints to keep, or all",
    "grace_period": "how long the job has from the signal until it is killed",
    "kill_wait": "how long to go on after the signal before saving",
    "max_restarts": "start it again after so many failures, each after a longer wait; preemptions do not count",
    "hang_timeout": "show the stacks of all ranks and start again when no step was completed for so long",
    "name": "the run's name, for status, pause, resume and logs",
    "progress_file": "a file that says, in JSON, how far the run is",
    "progress_every": "write it after so many steps",
    "metrics_port": "say it over HTTP, too, for Prometheus as well: a port, 0 (any), off, or auto (28080 in a pod)",
}


def arguments(parser: ArgumentParser) -> None:
    for name, text in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=f"{text} [{KINDS[name].env}]")
    fresh = "start over; checkpoints that are there are moved aside [CHECKPOINT_RESUME=false]"
    parser.add_argument("--fresh", action="store_true", default=None, help=fresh)
    parser.add_argument("--detach", action="store_true", help="return at once; the run goes on in the background")
    parser.add_argument("--explain", action="store_true", help="say which setting comes from where, and do nothing")
    parser.add_argument("command", nargs=REMAINDER, metavar="COMMAND…", help="what you would type without us")


def main(args: Namespace) -> int:
    settings = resolve({name: getattr(args, name) for name in (*_OPTIONS, "fresh")})
    if settings.name is not None:
        check_name(settings.name)
    _check_every(settings.every)
    if args.explain:
        show_settings(settings)
        return 0
    if args.detach:
        ours = sys.argv[2 : len(sys.argv) - len(args.command)]
        return start_detached(["run", *(word for word in ours if word != "--detach"), *args.command])
    return launch(args.command, settings)


def launch(command: Sequence[str], settings: Settings, **options: Any) -> int:
    """In this process, until it ends; the exit code."""
    _say_what_is_logged()
    try:
        return Launcher(parse(command), settings, **options).run()
    except NotFound as error:
        say(str(error))
        return error.code


def start_detached(words: list[str]) -> int:
    """As a process of its own, that outlives this one and its terminal."""
    process = subprocess.Popen(  # noqa: S603 - ourselves
        [sys.executable, "-m", "reprieve", *words],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    runs = Runs()
    while (code := process.poll()) is None:
        for record in runs.all():
            if record.pid == process.pid and record.alive:
                print(record.name)
                say(f"runs in the background: reprieve status {record.name}, reprieve logs --follow {record.name}")
                return 0
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    ended = [record for record in runs.all() if record.pid == process.pid]
    say(
        f"{ended[0].reason} (reprieve logs {ended[0].name})"
        if ended
        else "it could not be started; try it without --detach"
    )
    return code


def show_settings(settings: Settings) -> None:
    from rich.table import Table

    from reprieve.cli.output import data

    table = Table("setting", "value", "from", "what it is", box=None, pad_edge=False)
    for name, kind in KINDS.items():
        value = getattr(settings, name)
        shown = {None: "-", True: "yes", False: "no"}.get(value) if value is None or isinstance(value, bool) else None
        table.add_row(
            name.replace("_", "-"), shown or kind.write(value), settings.sources[name], f"{kind.help} [{kind.env}]"
        )
    data.print(table, highlight=False, markup=False)


def _check_every(every: Any) -> None:
    """Before anything is started: a typing error should not cost a minute."""
    from reprieve.checkpoint.schedule import Schedule

    try:
        Schedule.of(every)
    except ConfigError as error:
        raise ConfigError(f"--every: {error}") from None


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def _say_what_is_logged() -> None:
    logger = logging.getLogger("reprieve")
    logger.addHandler(_Said())
    logger.setLevel(logging.INFO)
    logger.propagate = False
