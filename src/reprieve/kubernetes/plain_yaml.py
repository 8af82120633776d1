"""YAML without aliases, with which a short text expands to any size, and without values that JSON does not have: dates,
sets, infinity. No message has a part of the text, which may be a secret: messages are logged."""

from __future__ import annotations

import json
from typing import Any

import yaml

from reprieve.errors import ConfigError

_MAX_TEXT_LENGTH = 64 * 1024
_OF_CONSTRUCTORS = (ValueError, LookupError, AttributeError, RecursionError)
"""What PyYAML lets through: for a 13th month, `!!int ''`, `!!timestamp x`, a list in a list in a list …"""


def load(text: str, where: str) -> object:
    """Parse a text that people have written. `where`: what it is, for messages. Raises ConfigError."""
    if len(text) > _MAX_TEXT_LENGTH:
        raise ConfigError(f"{where}: {len(text)} characters; at most {_MAX_TEXT_LENGTH} are read")
    try:
        content: object = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, *_OF_CONSTRUCTORS) as error:
        raise ConfigError(f"{where} is not YAML: {_problem(error)}") from None
    try:
        json.dumps(content, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(
            f"{where}: it has a value that JSON does not have, such as a date: write it in quotes"
        ) from None
    return content


def _problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        place = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        return f"{': '.join(filter(None, (error.context, error.problem)))} in {place}"
    return str(error) if isinstance(error, yaml.YAMLError) else "a value of it cannot be read"


def dump(content: object) -> str:
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, default_flow_style=False)
    return text


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True
