"""Reads the file of `--config`: a YAML or JSON mapping of options, as texts."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from reprieve.errors import ConfigError, needing


def read_config(file: str, names: Collection[str]) -> dict[str, str]:
    """Return the text of each option that the file gives. Raises ConfigError for a key that is no option."""
    path = Path(file).expanduser()
    with needing("--config"):
        import yaml
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {file} is neither YAML nor JSON: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: write a mapping like 'learning_rate: 2e-4'")
    found = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if "token" in name.lower() and name not in names:
            raise ConfigError(f"--config {file}: {key} does not belong in a file. Set HF_TOKEN in the environment")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"do you mean {near[0]}?" if near else f"options are {', '.join(names)}"
            raise ConfigError(f"--config {file}: there is no option {key!r}: {hint}")
        if value is not None:
            found[name] = _text(value)
    return found


def _text(value: Any) -> str:
    """Return what one would write on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
