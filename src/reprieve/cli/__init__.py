"""The command line: one file a command, each with `arguments` and `main`. stdout is data, stderr is talk.

Exit codes: 0 as asked; 1 the answer is bad news (a checkpoint is not valid); 2 the command could not be understood or
carried out. `run` and `resume` end as the training does (docs/launch.md).

Only what is asked for is imported: the launcher is there before the training command is, and should not be noticed.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from reprieve import exit_codes
from reprieve._version import __version__
from reprieve.errors import ConfigError, ReprieveError

COMMANDS = {
    "run": "run a training command so that it can be stopped at any moment",
    "drill": "rehearse a preemption: would the job survive its grace period?",
    "status": "show the runs of this machine",
    "pause": "save a run and stop it",
    "resume": "start a run again, as it was started before",
    "logs": "show what a run printed",
    "doctor": "check this machine: is there something to fix?",
    "ls": "list the checkpoints in a folder",
    "show": "show one checkpoint",
    "verify": "read every byte of checkpoints and say whether they are good",
}

_TRAINS = ("run", "resume")


def main(words: Sequence[str] | None = None) -> None:
    sys.exit(execute(sys.argv[1:] if words is None else words))


def execute(words: Sequence[str]) -> int:
    """The exit code of `reprieve WORDS…`."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else exit_codes.USAGE_ERROR
    if words[0] == "--version":
        print(__version__)
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        print(f"reprieve: there is no command {name!r}\n\n{_help()}", file=sys.stderr)
        return exit_codes.USAGE_ERROR
    try:
        command = import_module(f"reprieve.cli.{name}")
        return int(command.main(_parser(name, command).parse_args(rest)))
    except ReprieveError as error:
        print(f"error: {error}", file=sys.stderr)
        # What starts a training ends like one: a setting that is wrong needs a person.
        is_permanent = name in _TRAINS and isinstance(error, ConfigError)
        return exit_codes.PERMANENT_FAILURE if is_permanent else exit_codes.USAGE_ERROR
    except BrokenPipeError:  # `reprieve ls | head`
        sys.stderr.close()
        return 0


def _parser(name: str, command: Any) -> ArgumentParser:
    """What the command's module says, below its first line."""
    about = (command.__doc__ or "").partition("\n\n")[2].strip()
    summary = COMMANDS[name]
    parser = ArgumentParser(
        prog=f"reprieve {name}",
        description=summary[0].upper() + summary[1:] + ("" if summary.endswith("?") else "."),
        epilog=about,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.arguments(parser)
    return parser


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: reprieve COMMAND …\n\nTraining that can be stopped, and goes on where it was.\n\n"
        f"{commands}\n\n"
        "  reprieve COMMAND --help says more; for example:\n"
        "    reprieve run --every 10m python train.py\n"
        "    reprieve status\n"
    )
