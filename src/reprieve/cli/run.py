"""`reprieve run`: runs a training command that can be stopped, restarted and resumed.

COMMAND is what you type today: python train.py …, train.py …, torchrun …, accelerate launch …, deepspeed …. Options of
reprieve come before it; the variable in brackets sets the same.

exit codes:
  0     training finished
  143   stopped (SIGTERM, reprieve pause, a cloud's notice) and saved: the next start resumes exactly there
  42    permanent failure, restarting will not help: a wrong setting, no valid checkpoint, another model's checkpoint
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
from reprieve.launch.messages import print_exit_message, print_message
from reprieve.launch.runs.run_record import Runs, check_name
from reprieve.run_state import RunState
from reprieve.settings import SETTINGS, Settings, option_of, resolve

_OPTIONS = {name: setting for name, setting in SETTINGS.items() if setting.is_option}


def arguments(parser: ArgumentParser) -> None:
    for name, setting in _OPTIONS.items():
        if setting.metavar is not None:
            parser.add_argument(option_of(name), metavar=setting.metavar, help=f"{setting.help} [{setting.env}]")
        else:  # --fresh
            text = f"{setting.help} [{setting.env}=false]"
            parser.add_argument(option_of(name), action="store_true", default=None, help=text)
    parser.add_argument("--detach", action="store_true", help="return at once; the run continues in the background")
    parser.add_argument("--explain", action="store_true", help="show where each setting comes from, and exit")
    parser.add_argument("command", nargs=REMAINDER, metavar="COMMAND…", help="the training command")


def main(args: Namespace) -> int:
    settings = resolve({name: getattr(args, name) for name in _OPTIONS})
    if settings.name is not None:
        check_name(settings.name)
    _check_every(settings)
    if args.explain:
        show_settings(settings)
        return 0
    if args.detach:
        return start_detached(["run", *_as_words(settings), *args.command])
    return launch(args.command, settings)


def _as_words(settings: Settings) -> list[str]:
    """Return the options of the command line that these settings were given with."""
    words = [f"{option_of(name)}={text}" for name, text in settings.options().items()]
    return [*words, option_of("fresh")] if settings.sources["fresh"] == option_of("fresh") else words


def launch(command: Sequence[str], settings: Settings, **options: Any) -> int:
    """Run the command until it ends and return the exit code."""
    _print_log_records()
    try:
        return Launcher(parse(command), settings, **options).run()
    except NotFound as error:
        print_exit_message(str(error), RunState.FAILED)
        return error.code


def start_detached(words: list[str]) -> int:
    """Start `reprieve WORDS…` as a process that outlives this one and its terminal."""
    process = subprocess.Popen(  # noqa: S603 - this program
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
                print_message(
                    f"running in the background: reprieve status {record.name}, reprieve logs --follow {record.name}"
                )
                return 0
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    ended = [record for record in runs.all() if record.pid == process.pid]
    print_message(
        f"{ended[0].reason} (reprieve logs {ended[0].name})"
        if ended
        else "the run could not be started; try it without --detach"
    )
    return code


def show_settings(settings: Settings) -> None:
    from rich.table import Table

    from reprieve.cli.output import data

    table = Table("setting", "value", "from", "meaning", box=None, pad_edge=False)
    for name, setting in SETTINGS.items():
        value = getattr(settings, name)
        if value is None:
            text = "-"
        else:
            text = ("yes" if value else "no") if isinstance(value, bool) else setting.format(value)
        table.add_row(name.replace("_", "-"), text, settings.sources[name], f"{setting.help} [{setting.env}]")
    data.print(table, highlight=False, markup=False)


def _check_every(settings: Settings) -> None:
    """Raise ConfigError before anything is started: a typing error should not cost a minute."""
    from reprieve.checkpoint.schedule import Schedule

    try:
        Schedule.of(settings.every)
    except ConfigError as error:
        raise ConfigError(f"{settings.sources['every']}: {error}") from None


class _PrintRecords(logging.Handler):
    """Prints log records as messages of the launcher."""

    def emit(self, record: logging.LogRecord) -> None:
        print_message(record.getMessage())


def _print_log_records() -> None:
    logger = logging.getLogger("reprieve")
    logger.addHandler(_PrintRecords())
    logger.setLevel(logging.INFO)
    logger.propagate = False
