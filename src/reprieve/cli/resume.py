"""`reprieve resume`: start a run again, with the command, folder, options and environment it had.

It goes on from its newest checkpoint. Variables that look like secrets (HF_TOKEN, …) were not stored: they are taken
from here.

example: reprieve resume train-3f2a1b
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

from reprieve.cli.run import launch, start_detached
from reprieve.errors import ConfigError
from reprieve.launch.messages import print_message
from reprieve.launch.runs.run_record import RunRecord, Runs
from reprieve.redaction import HIDDEN
from reprieve.settings import resolve

_OF_THE_CALLER = ("REPRIEVE_STATE_DIR", "XDG_STATE_HOME", "HOME")
"""Where we look for the run: not taken from its record, in which they say the same."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", help="the run's name; reprieve status lists them")
    parser.add_argument("--detach", action="store_true", help="return at once; the run goes on in the background")


def main(args: Namespace) -> int:
    run: str = args.run
    record = Runs().find(run)
    if record.alive:
        raise ConfigError(f"{run} is running already (pid {record.pid}): reprieve status {run}")
    if any(HIDDEN in word for word in record.command):
        raise ConfigError(
            f"{run} was started with a secret on its command line, which is not stored. Start it as you did before, "
            "better with the secret in a variable"
        )
    if args.detach:
        return start_detached(["resume", run])
    _enter(record)
    return launch(tuple(record.command), resolve(record.settings), name=record.name)


def _enter(record: RunRecord) -> None:
    """This process becomes what the run was started in."""
    try:
        os.chdir(record.folder)
    except OSError as error:
        raise ConfigError(f"{record.name} was started in {record.folder}: {error.strerror}") from None
    secrets = {name: os.environ[name] for name in record.left_out if name in os.environ}
    caller = {name: os.environ[name] for name in _OF_THE_CALLER if name in os.environ}
    if missing := [name for name in record.left_out if name not in os.environ]:
        print_message(
            f"not stored, and not set here: {', '.join(missing)}. If the script needs them, set them and resume again"
        )
    os.environ.clear()
    os.environ.update({**record.environment, **secrets, **caller})
