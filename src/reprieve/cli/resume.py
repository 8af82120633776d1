"""`reprieve resume`: starts a run or a TrainJob again, with the same command, folder, options and environment.

The run resumes from its newest checkpoint. Variables that look like secrets (HF_TOKEN, …) are not stored: they come
from the current environment.

Of TrainJobs, it resumes those that Reprieve has paused. One that somebody else has suspended stays suspended.

examples:
  reprieve resume train-3f2a1b
  reprieve resume trainjob/finetune --namespace team
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

from reprieve.cli.run import launch, start_detached
from reprieve.cli.trainjob.target import add_options, find_job
from reprieve.errors import ConfigError
from reprieve.launch.messages import print_message
from reprieve.launch.runs.run_record import RunRecord, Runs
from reprieve.progress.redaction import HIDDEN
from reprieve.settings import resolve

_CALLER_VARIABLES = ("REPRIEVE_STATE_DIR", "XDG_STATE_HOME", "HOME")
"""They determine where the run record is, and are kept from the current environment."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's name, or trainjob/NAME; reprieve status lists them")
    parser.add_argument("--detach", action="store_true", help="return at once; the run continues in the background")
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON (a TrainJob)")


def main(args: Namespace) -> int:
    if (target := find_job(args.run, args, "json")) is not None:
        from reprieve.cli.trainjob import verbs

        return verbs.resume(target, args)
    run: str = args.run
    record = Runs().find(run)
    if record.alive:
        raise ConfigError(f"{run} is running already (pid {record.pid}): reprieve status {run}")
    if any(HIDDEN in word for word in record.command):
        raise ConfigError(
            f"{run} was started with a secret on its command line, which is not stored. Start it as you did before, "
            "preferably with the secret in a variable"
        )
    if args.detach:
        return start_detached(["resume", run])
    _enter_environment(record)
    return launch(tuple(record.command), resolve(record.settings), name=record.name)


def _enter_environment(record: RunRecord) -> None:
    """Change to the folder and the environment that the run was started in."""
    try:
        os.chdir(record.folder)
    except OSError as error:
        raise ConfigError(f"{record.name} was started in {record.folder}: {error.strerror}") from None
    secrets = {name: os.environ[name] for name in record.left_out if name in os.environ}
    caller = {name: os.environ[name] for name in _CALLER_VARIABLES if name in os.environ}
    if missing := [name for name in record.left_out if name not in os.environ]:
        print_message(
            f"not stored because they look like secrets, and not set: {', '.join(missing)}. If the script needs them, "
            "set them and resume again"
        )
    os.environ.clear()
    os.environ.update({**record.environment, **secrets, **caller})
