"""What a save was asked for with, and what its manifest says of that."""

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
    """As it was given: what is wrong with it on one rank, all should know."""

    step: int
    epoch: float | None
    metrics: Mapping[str, float] | None
    values: Mapping[str, Any] | None
    extra_files: Callable[[], Sequence[FileLayout]]
    unrequested: bool
    replace: bool

    def manifest(
        self, created: datetime, owner: LeaseView, ranks: Ranks, *, parent: str | None, state: list[str]
    ) -> Manifest:
        """Without the files."""
        return Manifest(
            step=self.step,
            epoch=None if self.epoch is None else float(self.epoch),
            created=created.isoformat(timespec="seconds"),
            run=owner.run,
            attempt=owner.attempt,
            parent=parent,
            world_size=ranks.world_size,
            versions=_versions(),
            metrics=_finite(self.metrics) if ranks.rank == 0 else {},
            state=state,
            unrequested=self.unrequested,
            files={},
        )


def check_same_step(plans: list[dict[str, Any]]) -> None:
    if len({one["step"] for one in plans}) > 1:
        by_rank = ", ".join(f"rank {rank} at {one['step']}" for rank, one in enumerate(plans))
        raise StateError(f"the ranks save at different steps: {by_rank}")


def _finite(metrics: Mapping[str, float] | None) -> dict[str, float]:
    numbers = {name: float(value) for name, value in (metrics or {}).items()}
    odd = sorted(name for name, value in numbers.items() if not math.isfinite(value))
    if odd:
        log.warning("metrics that are not finite are not recorded with the checkpoint: %s", ", ".join(odd))
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _versions() -> dict[str, str]:
    found = {"reprieve": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("safetensors", "numpy", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
