"""Finds the model and the data: in a folder, in the cache of huggingface_hub, or on the hub.

Nothing here imports torch or transformers: a wrong name is refused within a second.

    org/name, org/name@revision, hf://org/name     download.py brings it into the cache
    …/models--org--name/snapshots/HASH             a snapshot of that cache, wherever it was copied to
    …/models--org--name, or a folder with one      its only snapshot, or that of refs/main
    a folder, a file                               as it is
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reprieve.errors import ConfigError
from reprieve.storage.uri import local_path

MODEL, DATASET = "model", "dataset"
_HUB_ID = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
_OPTIONS = {MODEL: "--model_name", DATASET: "--dataset_path"}
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HubId:
    """A repository of the hub."""

    kind: str
    """`MODEL` or `DATASET`."""
    name: str
    revision: str | None = None
    """The revision that the user named."""


def find_source(kind: str, text: str) -> Path | HubId:
    """Return what a user means by a model or by data. Raises ConfigError if it is a path, and nothing is there."""
    text = text.strip()
    if text.startswith("hf://"):
        return _hub_id(kind, text.removeprefix("hf://").removeprefix("datasets/"))
    path = local_path(text)
    if path.exists():
        return snapshot_in(kind, path)
    if text.startswith(("/", ".", "~", "file:")) or text.count("/") > 1 or _HUB_ID.fullmatch(text) is None:
        raise ConfigError(f"{_OPTIONS[kind]} {text}: {_nearest(path)}. Check the path, or give a hub id like org/name")
    return _hub_id(kind, text)


def _hub_id(kind: str, text: str) -> HubId:
    match = _HUB_ID.fullmatch(text)
    if match is None:
        raise ConfigError(f"{_OPTIONS[kind]}: {text!r} is no hub id: write org/name, or org/name@revision")
    return HubId(kind=kind, name=match[1], revision=match[2])


def _nearest(path: Path) -> str:
    """Say which part of the path exists."""
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    return f"there is no {path.relative_to(parent).parts[0]} in {parent}"


def snapshot_in(kind: str, path: Path) -> Path:
    """Return the snapshot in a folder of huggingface_hub's cache, or the path itself if it is none."""
    if not path.is_dir():
        return path
    if not path.name.startswith(f"{kind}s--"):
        repositories = sorted(path.glob(f"{kind}s--*/snapshots"))
        if not repositories:
            return path
        if len(repositories) > 1:
            found = ", ".join(each.parent.name for each in repositories[:_SHOWN])
            raise ConfigError(f"{_OPTIONS[kind]} {path} holds {len(repositories)} {kind}s: choose {found}")
        path = repositories[0].parent
    snapshots = sorted(each for each in (path / "snapshots").glob("*") if each.is_dir())
    main = path / "refs" / "main"
    if main.is_file() and (named := path / "snapshots" / main.read_text().strip()) in snapshots:
        return named
    if len(snapshots) != 1:
        found = ", ".join(each.name for each in snapshots[:_SHOWN]) or "there is none"
        raise ConfigError(f"{_OPTIONS[kind]} {path}: name one of its snapshots ({found})")
    return snapshots[0]


def check_model(folder: Path, shown: str) -> None:
    """Raise ConfigError unless a model can be loaded from the folder. `shown`: what the user calls it."""
    if not folder.is_dir():
        raise ConfigError(f"--model_name {shown} is a file: give the folder with its config.json and weights")
    if (config := folder / "config.json").is_symlink() and not config.exists():
        raise ConfigError(
            f"--model_name {shown}: {config.name} is a link to {config.readlink()}, which is missing. Copy the whole "
            "models--… folder, or download it again"
        )
    names = sorted(path.name for path in folder.iterdir())
    if not config.is_file():
        if "adapter_config.json" in names:
            raise ConfigError(
                f"--model_name {shown} is an adapter, not a whole model: give the model that it was made for"
            )
        raise ConfigError(f"--model_name {shown} is no model: it has no config.json, but {listed(names)}")
    if not weight_files(folder):
        raise ConfigError(f"--model_name {shown} has no weights (*.safetensors), but {listed(names)}")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"--model_name {shown} has no tokenizer (tokenizer.json), but {listed(names)}")


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of a model: safetensors if there are any."""
    for pattern in _WEIGHTS:
        if found := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return found
    return []


def listed(names: Iterable[str]) -> str:
    """Join names for a message, the first few of them."""
    names = list(names)
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
