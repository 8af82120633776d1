"""The launcher before the command of a TrainJob.

`reprieve run` must be the first process of the pod, or started by one that passes SIGTERM on: it gets the SIGTERM, and
its exit code decides whether the job counts a failure. Commands are looked at with their arguments, through programs
such as `env` and `tini`, and in the scripts of shells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import PurePosixPath

LAUNCHER = ("reprieve", "run", "--")
BECOMES_LAUNCHER = "# Becomes the launcher: exec reprieve run"
"""As the first line of a shell script: it starts the launcher in a way that cannot be seen in it (sdk/command.py)."""

_LAUNCHERS = {"run", "hold"}
"""Commands of Reprieve that may be the first process of a pod."""
_SHELLS = {"sh", "bash", "dash", "ash", "zsh"}
_WRAPPER = re.compile(r"env|tini(-static)?|dumb-init|catatonit|uv|nohup|nice|setsid|stdbuf|sudo|python[0-9.]*")
"""Programs that start another one and pass SIGTERM on to it, or become it."""
_UV_RUN = ("uv", "run")
_MAX_WORDS = 1000
"""Of a command; the launcher is found among them or not at all."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_KEYWORDS = {"then", "do", "else", "elif", "if", "while", "until", "time", "!", "command", "exec"}
_SHELL_TOKEN = re.compile(
    r"""(?P<comment>(?<![^\s;&|()])\#[^\n]*)
      | (?P<quoted>'[^']*'|"[^"\\]*(?:\\.[^"\\]*)*")
      | (?P<joined>\\\n) | (?P<escaped>\\.)
      | (?P<here_string><<<)
      | <<-?[ \t]*['"\\]?(?P<here_document>\w+)['"]?
      | (?P<newline>\n)
      | [\w./=-]+ | .""",
    re.VERBOSE | re.DOTALL,
)
_PLAIN_WORD = re.compile(r"[^\s;&|(){}<>#]*")
_COMMAND_END = re.compile(r"[\n;&|(){}]+")
TORCHTUNE = ["tune", "run"]
"""Trainer recognises its torchtune jobs by this command, so it may not change."""


def starts_launcher(command: Sequence[str]) -> bool:
    """Whether the command, with its arguments, starts `reprieve run` by itself."""
    words = _unwrapped(command)
    if _is_launcher(words) or any(_is_launcher(_unwrapped(each)) for each, _ in _script_commands(words)):
        return True
    return _name(words) in _SHELLS and any(word.startswith(f"{BECOMES_LAUNCHER}\n") for word in words)


def hides_launcher(command: Sequence[str]) -> bool:
    """Whether a shell starts `reprieve run` as its child: shells do not forward SIGTERM."""
    found = [is_exec for each, is_exec in _script_commands(_unwrapped(command)) if _is_launcher(_unwrapped(each))]
    return bool(found) and not any(found)


def _is_launcher(words: Sequence[str]) -> bool:
    return len(words) > 1 and _name(words) == "reprieve" and words[1] in _LAUNCHERS


def _name(words: Sequence[str]) -> str:
    return PurePosixPath(words[0]).name if words else ""


def _unwrapped(words: Sequence[str]) -> list[str]:
    """The command that `env A=b`, `tini --`, `uv run` or `python -m` starts."""
    words = list(words[:_MAX_WORDS])
    while _WRAPPER.fullmatch(_name(words)):
        name = _name(words)
        del words[0]
        while words and (words[0].startswith("-") or _ASSIGNMENT.fullmatch(words[0]) or (name, words[0]) == _UV_RUN):
            option = words.pop(0)
            has_value = option.startswith("-") and option != "--" and "=" not in option
            if has_value and words and not words[0].startswith("-") and not _is_known(words):
                del words[0]  # its value, as far as can be seen from here
    return words


def _is_known(words: Sequence[str]) -> bool:
    return _is_launcher(words) or _name(words) in _SHELLS or _WRAPPER.fullmatch(_name(words)) is not None


def _script_commands(words: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """The commands in the script of a shell, and whether the shell becomes them by `exec`."""
    if _name(words) not in _SHELLS:
        return
    for script in words[1:]:
        for text in _COMMAND_END.split(_without_text(script)):
            found = text.split()
            before = list(takewhile(lambda word: word in _KEYWORDS or _ASSIGNMENT.fullmatch(word), found))
            yield found[len(before) :], "exec" in before


def _without_text(script: str) -> str:
    """Return a shell script without what it does not run: comments, quoted text, the lines of here-documents."""
    found, ends, position = [], list[str](), 0
    while token := _SHELL_TOKEN.match(script, position):
        text, position = token.group(), token.end()
        if token["here_document"]:
            ends.append(token["here_document"])
        elif token["newline"] and ends:
            for end in ends:
                last = re.compile(rf"^\t*{end}$", re.MULTILINE).search(script, position)
                position = last.end() if last else len(script)
            ends.clear()
        elif token["quoted"]:
            text = text[1:-1] if _PLAIN_WORD.fullmatch(text[1:-1]) else "_"
        elif token["comment"] or token["joined"]:
            text = " "
        found.append(text)
    return "".join(found)
