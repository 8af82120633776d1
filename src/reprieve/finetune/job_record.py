"""The record of a fine-tuning job, `finetune.json` in its output folder: what is trained, and how far it is.

Rank 0 writes it, at the start, after the training and at the end. It pins the commits of the hub: a resumed run must
not continue with another model or with other data. A finished job that is started again with the same options ends at
once.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from reprieve.storage.disk import Disk
from reprieve.storage.uri import local_path

FILE = "finetune.json"
VERSION = 1
_SOURCES = ("model_name", "dataset_path", "dataset_config", "dataset_split")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What is trained, and how far it is."""

    options: dict[str, Any]
    commits: dict[str, str] = field(default_factory=dict)
    """`model` or `dataset` → commit, for what came from the hub."""
    date: str = field(default_factory=lambda: datetime.now().date().isoformat())
    """When the job began: the day that chat templates show."""
    trained: bool = False
    """The training is complete, and the adapter is there."""
    merged: bool = False
    """`final/` holds this training."""
    finished: bool = False
    """The merged model is there, too, if it is wanted."""
    version: int = VERSION

    @property
    def sources(self) -> tuple[Any, Any]:
        return self.options.get("model_name"), self.options.get("dataset_path")

    def other_source(self, other: JobRecord) -> str | None:
        """Return the option by which the other job has another model or other data."""
        for name in _SOURCES:
            if _written_alike(self.options.get(name)) != _written_alike(other.options.get(name)):
                return name
        return None

    def trains_as(self, other: JobRecord) -> bool:
        """Whether the other job trains the same adapter."""
        return self.options | {"merge": None} == other.options | {"merge": None}

    def write(self, folder: Path) -> None:
        Disk().replace_file(folder / FILE, json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n")


def _written_alike(source: str | None) -> str | None:
    """Return a name or a path such that two spellings of one path are equal."""
    if source is None or ("://" in source and not source.startswith("file:")):
        return source
    return str(local_path(source))


def read_record(folder: Path) -> JobRecord | None:
    """Return the record of an earlier start; None: there is none that this version reads."""
    try:
        content = json.loads((folder / FILE).read_bytes())
        if content["version"] > VERSION:
            return None
        return JobRecord(**{entry.name: content[entry.name] for entry in fields(JobRecord) if entry.name in content})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_durable(folder: Path) -> None:
    """Flush the files in a folder, and their names, before the record says that they are there: after a power cut it
    would name a torn adapter as the result, and nothing would write it again."""
    for path in folder.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    Disk().flush_folder(folder)
