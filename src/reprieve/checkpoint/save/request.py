"""What a save was called with, and the manifest that records it."""

from __future__ import annotations

import contextlib
import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from reprieve._version import __version__
from reprieve.checkpoint.folder.lease import LeaseView
from reprieve.checkpoint.format.layout import FileLayout
from reprieve.checkpoint.format.manifest import Manifest
from reprieve.errors import StateError
from reprieve.ranks.group import Ranks

log = logging.getLogger("reprieve")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of a save, unchecked: an agreement checks them, so that an error on one rank reaches all."""

    step: int
    epoch: float | None
    metrics: Mapping[str, float] | None
    values: Mapping[str, Any] | None
    extra_files: Callable[[], Sequence[FileLayout]]
    unrequested: bool
    replace: bool
    is_last: bool = False
    """The process ends after this save: it is not followed by pruning."""

    def manifest(
        self, created: datetime, lease: LeaseView, ranks: Ranks, *, parent: str | None, state: list[str], number: int
    ) -> Manifest:
        """The manifest of the save, without its files."""
        return Manifest(
            step=self.step,
            epoch=None if self.epoch is None else float(self.epoch),
            created=created.isoformat(timespec="seconds"),
            run=lease.run,
            attempt=lease.attempt,
            parent=parent,
            world_size=ranks.world_size,
            versions=_versions(),
            metrics=_finite(self.metrics) if ranks.rank == 0 else {},
            state=state,
            unrequested=self.unrequested,
            number=number,
            files={},
        )


def check_same_step(steps: Sequence[int]) -> None:
    """Raise StateError unless all ranks save the same step. `steps`: the step of each rank."""
    if len(set(steps)) > 1:
        by_rank = ", ".join(f"rank {rank} at {step}" for rank, step in enumerate(steps))
        raise StateError(f"the ranks save at different steps: {by_rank}. Save after the same step on every rank")


def _finite(metrics: Mapping[str, float] | None) -> dict[str, float]:
    numbers = {name: float(value) for name, value in (metrics or {}).items()}
    not_finite = sorted(name for name, value in numbers.items() if not math.isfinite(value))
    if not_finite:
        log.warning("metrics that are not finite are not recorded with the checkpoint: %s", ", ".join(not_finite))
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _versions() -> dict[str, str]:
    versions = {"reprieve": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("safetensors", "numpy", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
