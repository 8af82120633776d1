"""The training command: as the user typed it, and as it is started.

    train.py …                     a Python script: this interpreter runs it
    torchrun … / accelerate …      found on the path, or beside this interpreter
    anything else                  as it is

No shell interprets it: arguments with spaces, quotes and any characters arrive unchanged.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reprieve import exit_codes
from reprieve.errors import ReprieveError


class NotFound(ReprieveError):
    """The command does not exist or cannot be executed. `code`: the exit code of a shell."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Command:
    """A command line."""

    words: tuple[str, ...]
    """As typed."""
    argv: tuple[str, ...]
    """As started."""

    @property
    def script(self) -> str:
        """The name of the script or program, from which the run gets its name."""
        for word in self.words:
            if word.endswith(".py"):
                return Path(word).stem
        words = list(self.words)
        if "-m" in words[:-1]:
            return words[words.index("-m") + 1].rpartition(".")[2]
        return Path(words[0]).stem


def parse(words: Sequence[str], env: Mapping[str, str] = os.environ) -> Command:
    """Resolve a command line. Raises NotFound with what to do about it."""
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise NotFound("there is no command to run: reprieve run python train.py", exit_codes.USAGE_ERROR)
    first = words[0]
    if first.endswith(".py") and not os.access(first, os.X_OK):
        if not Path(first).is_file():
            raise NotFound(f"{first} does not exist (in {Path.cwd()})", exit_codes.COMMAND_NOT_FOUND)
        return Command(tuple(words), (sys.executable, *words))
    if first.endswith(".py") and os.sep not in first and Path(first).is_file():
        return Command(tuple(words), (str(Path(first).absolute()), *words[1:]))
    found = shutil.which(first, path=env.get("PATH"))
    if found is None and os.sep not in first:
        # In a virtual environment that is not activated, torchrun is beside the interpreter.
        found = shutil.which(first, path=str(Path(sys.executable).parent))
    if found is None:
        path = Path(first)
        if os.sep in first and path.exists():
            raise NotFound(
                f"{first} cannot be executed: is it a program? (chmod +x, or put an interpreter before it)",
                exit_codes.CANNOT_EXECUTE,
            )
        raise NotFound(
            f"{first}: no such command. Is it installed, and is its environment active?", exit_codes.COMMAND_NOT_FOUND
        )
    return Command(tuple(words), (found, *words[1:]))
