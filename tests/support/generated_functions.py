"""Training functions with all that shells and encodings like to change."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

NASTY = (
    *(
        "$HOME",
        "${x:-y}",
        "$(id)",
        "`date`",
        "\\",
        "\\\\n",
        "'",
        '"',
        '"""',
        "EOF",
        "\nEOF\n",
        "<<EOF",
        "!!",
        "%s {} {0}",
    ),
    *("é🚆", "\u2028", "\t", "\x00", "\r", "{func_file}", "plain text", "#"),
)


DECORATORS = (
    "@(lambda function: function)  # $(id) `date`",
    "@(lambda function: __import__('functools').wraps(function)(lambda: function()))",
)
"""They use nothing from outside. The second makes another function."""


def nasty_function(random: Random) -> str:
    """Return the source of a function `train_func` that returns, and prints, what it contains."""
    literals = ["".join(random.choices(NASTY, k=random.randrange(6))) for _ in range(random.randrange(1, 5))]
    comment = "".join(each for each in "".join(random.choices(NASTY, k=4)) if each.isprintable())
    lines = [*random.choices(DECORATORS, k=random.randrange(3)), "def train_func():"]
    if random.random() < 0.5:
        lines.append(f"    # -*- coding: latin-1 -*- {comment}")
    if random.random() < 0.5:
        lines += ['    """$HOME `id`', "  EOF", '    """']
    lines += [
        "    import functools",
        "    found = []",
        "    @functools.lru_cache(maxsize=None)",
        "    def nested(number):",
        f"        # {comment}",
        "        def deeper(): return number, r'\\$'",
        "        return deeper()",
        *(f"    found.append({each!r})" for each in literals),
        "    found.append(nested(1))",
    ]
    if random.random() < 0.5:
        lines += ["    found.append('''", "EOF", "   ", "$PATH'''", "    )"]
    lines += ["    print(ascii(found))", "    return found"]
    text = "\n".join(lines) + "\n"
    if random.random() < 0.3:  # as a function in another one has it
        indented = "".join(f"    {line}" for line in text.splitlines(keepends=True) if "EOF" not in line)
        return indented if "'''" not in text and '"""' not in text else text
    return text


def imported(text: str, folder: Path) -> Callable[..., Any]:
    """Return the function `train_func` of a module with this text."""
    file = folder / f"module_{uuid.uuid4().hex}.py"
    above = "if True:\n" if text.startswith(" ") else "# A line above it.\n\n\n"
    file.write_text(f"{above}{text}", encoding="utf-8", newline="")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train_func  # type: ignore[no-any-return]
