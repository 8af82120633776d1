"""Reads the fields of an object that people have written, and says which one is wrong and what to write.

The API server checks the same in the schema (crd.py), but an annotation has no schema, and admission comes before that
check. Messages are logged, so they have the type of a wrong value, not the value: it may be a misplaced secret.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from reprieve.errors import ConfigError
from reprieve.units import parse_duration

Object = dict[str, Any]

OBJECT_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a part of the settings, and where they are."""

    content: object
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.content, Mapping | None):
            raise ConfigError(f"{self.where}: it is {_type_of(self.content)} and has no fields: write name: value")

    @property
    def values(self) -> Object:
        return dict(self.content) if isinstance(self.content, Mapping) else {}

    def child(self, *path: str) -> Fields:
        found = self
        for name in path:
            found = Fields(found.values.get(name), f"{found.where}.{name}")
        return found

    def items(self, name: str) -> list[Fields]:
        """Return the objects of a list."""
        return [Fields(each, f"{self.where}.{name}[{index}]") for index, each in enumerate(self._list(name))]

    def check_names(self, names: Sequence[str]) -> None:
        for name in self.values:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
                raise ConfigError(f"{self.where}.{name}: there is no such field: {hint}")

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name, default)
        if value is None:
            return default
        if not isinstance(value, str) and not (isinstance(value, int | float) and not isinstance(value, bool)):
            raise self._wrong_type(name, value, "a text")
        return str(value)

    def string(self, name: str, *, is_required: bool = False) -> str:
        """Return a text that may not be written as a number."""
        value = self.values.get(name)
        if is_required and value is None:
            raise ConfigError(f"{self.where}.{name}: there is none: write a text")
        if not isinstance(value, str | None):
            raise self._wrong_type(name, value, "a text in quotes")
        return value or ""

    def strings(self, name: str) -> list[str]:
        for index, value in enumerate(self._list(name)):
            if not isinstance(value, str):
                raise self._wrong_type(f"{name}[{index}]", value, "a text in quotes")
        return self._list(name)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self.text(name, "")
        if value and value not in choices:
            raise ConfigError(f"{self.where}.{name}: {value!r}: write {', '.join(choices[:-1])} or {choices[-1]}")
        return value

    def object_name(self, name: str) -> str:
        value = self.text(name, "")
        if value and not OBJECT_NAME.fullmatch(value):
            raise ConfigError(f"{self.where}.{name}: it is not the name of an object in Kubernetes")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong_type(name, value, "true or false")
        return value

    def integer(self, name: str, default: int) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong_type(name, value, "a whole number")
        return value

    def integer_or_none(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name, 0)

    def duration(self, name: str, *, zero: bool = False) -> timedelta | None:
        text = self.text(name, "").strip()
        if not text or (zero and text in ("0", "0s")):
            return None
        try:
            return parse_duration(float(text) if re.fullmatch(r"\d+", text) else text)
        except ConfigError:
            raise ConfigError(f"{self.where}.{name}: {text!r} is not a duration: write it like 30s or 2m") from None

    def _list(self, name: str) -> list[Any]:
        value = self.values.get(name)
        if not isinstance(value, list | None):
            raise self._wrong_type(name, value, "a list")
        return value or []

    def _wrong_type(self, name: str, value: object, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}.{name}: it is {_type_of(value)}: write {wanted}")


def _type_of(value: object) -> str:
    names = {str: "a text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")
