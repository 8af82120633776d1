"""The command line: one module per command, each with `arguments` and `main`. stdout has data, stderr messages.

Exit codes: 0 success; 1 the command found a problem, such as an invalid checkpoint; 2 the command could not be
understood or carried out. `run`, `resume`, `hold` and `finetune` exit as a training does (docs/launch.md).

Only the modules of the given command are imported: the launcher must not delay the training command.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from reprieve import exit_codes
from reprieve._version import __version__
from reprieve.cli.trainjob.target import names_train_job
from reprieve.errors import ConfigError, ReprieveError
from reprieve.run_state import RunState

COMMANDS = {
    "run": "run a training command so that it can be stopped at any moment",
    "drill": "rehearse a preemption and report whether the job survives its grace period",
    "status": "show the runs of this machine, or the TrainJobs of a cluster",
    "pause": "save a run or a TrainJob and stop it",
    "resume": "start a run or a TrainJob again, as it was started before",
    "logs": "show the output of a run or a TrainJob",
    "finetune": "fine-tune a language model with LoRA, so that it can be stopped at any moment",
    "hold": "hold a container for commands by kubectl exec, and let them save when it is stopped",
    "doctor": "check whether this machine is ready for preemptible training",
    "ls": "list the checkpoints in a folder, or of a TrainJob",
    "show": "show one checkpoint",
    "verify": "read every byte of checkpoints and report whether they are valid",
    "operator": "serve TrainJobs' spec.checkpointing on Kubernetes",
}

_TRAINING_COMMANDS = ("run", "resume", "hold", "finetune")
"""They exit as a training does (docs/launch.md). `resume trainjob/NAME` trains nothing."""


def main(words: Sequence[str] | None = None) -> None:
    sys.exit(execute(sys.argv[1:] if words is None else words))


def execute(words: Sequence[str]) -> int:
    """Run `reprieve WORDS…` and return the exit code."""
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
        if not _exits_as_a_training(words) or not isinstance(error, ConfigError):
            return exit_codes.USAGE_ERROR
        # Commands that start a training exit like one: a wrong setting is a permanent failure.
        from reprieve.launch.messages import write_exit_message

        write_exit_message(f"permanent failure, restarting will not help: {error}", RunState.FAILED)
        return exit_codes.PERMANENT_FAILURE
    except BrokenPipeError:  # `reprieve ls | head`
        sys.stderr.close()
        return 0


def _exits_as_a_training(words: Sequence[str]) -> bool:
    return words[0] in _TRAINING_COMMANDS and not (words[0] == "resume" and any(map(names_train_job, words)))


def _parser(name: str, command: Any) -> ArgumentParser:
    """Create the parser of a command. The epilog is the docstring of its module, without the first line."""
    epilog = (command.__doc__ or "").partition("\n\n")[2].strip()
    summary = COMMANDS[name]
    parser = ArgumentParser(
        prog=f"reprieve {name}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.arguments(parser)
    return parser


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: reprieve COMMAND …\n\nPreemptible PyTorch training: stop it at any moment, resume it bit for bit.\n\n"
        f"{commands}\n\n"
        "  reprieve COMMAND --help shows the options of a command. Examples:\n"
        "    reprieve run --every 10m python train.py\n"
        "    reprieve status\n"
    )
