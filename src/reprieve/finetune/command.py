"""The command itself: texts in, exit code out. `reprieve finetune` and scripts that call `main` are the same."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reprieve import exit_codes
from reprieve.errors import ReprieveError, is_permanent
from reprieve.finetune.environment import is_first_of_node
from reprieve.finetune.options import add_arguments, resolve
from reprieve.launch.messages import print_message
from reprieve.launcher_protocol import LAUNCHER_SOCKET, Protected, send_once
from reprieve.session.startup_errors import reporting_startup_errors


def main(words: Sequence[str] | None = None) -> int:
    """Train as the command line and the environment say, and return the exit code. A stop raises SystemExit(143)."""
    parser = argparse.ArgumentParser(
        prog=Path(sys.argv[0]).name,
        description="Fine-tune a language model with LoRA. It can be stopped at any moment, and resumes.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    return _execute(lambda: vars(parser.parse_args(words)))


def execute(given: Mapping[str, str | None]) -> int:
    """Run the job with these texts of the command line, and return the exit code."""
    return _execute(lambda: given)


def _execute(parse: Callable[[], Mapping[str, str | None]]) -> int:
    try:
        send_once(Protected())  # torchrun imports torch long before this process does, and has no script to look at
        given = parse()
        with reporting_startup_errors():
            options = resolve(given)
        from reprieve.finetune.job import run_job

        run_job(options)
    except ReprieveError as error:
        permanent = is_permanent(error)
        # A launcher prints what it gets to know of a permanent failure, and all ranks of a node would print the same.
        if not (permanent and os.environ.get(LAUNCHER_SOCKET)) and is_first_of_node():
            print_message(f"error: {error}")
        return exit_codes.PERMANENT_FAILURE if permanent else exit_codes.NOT_FINISHED
    return exit_codes.FINISHED
