"""The marker that a run is finished: `.reprieve/finished.json`, beside the lease record.

It is written when the last step is durable. A rerun that resumes from that step reads it and has nothing left to do. A
marker that is older than the checkpoint (the run was started over, or continued) is ignored, and so is one that cannot
be read: then the run resumes, and finds out by itself that nothing is left.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.folder.lease import FolderLease
from reprieve.checkpoint.format.manifest import Manifest
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

VERSION = 1
_NAME = "finished.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedMarker:
    """The content of `finished.json`."""

    run: str
    attempt: int
    step: int
    request: Any
    """How much training was requested, for a rerun that requests more."""
    version: int = VERSION

    def refers_to(self, manifest: Manifest) -> bool:
        """Whether the run finished with this checkpoint."""
        return (self.run, self.step) == (manifest.run, manifest.step) and self.attempt >= manifest.attempt

    def to_json(self) -> bytes:
        content = {
            "version": self.version,
            "run": self.run,
            "attempt": self.attempt,
            "step": self.step,
            "asked": self.request,
        }
        return json.dumps(content).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> FinishedMarker:
        """Raises ValueError for a newer version. Fields that it does not know are ignored."""
        content = json.loads(data)
        if (version := content.get("version", VERSION)) > VERSION:  # the first markers had none
            raise ValueError(f"it has version {version}, and this Reprieve reads versions up to {VERSION}")
        return cls(
            run=content["run"],
            attempt=content["attempt"],
            step=content["step"],
            request=content["asked"],
        )


def write(disk: Disk, root: Path, lease: FolderLease, step: int, request: Any) -> None:
    """Mark the run as finished with this step."""
    marker = FinishedMarker(run=lease.run, attempt=lease.attempt, step=step, request=request)
    with lease.committing():
        disk.replace_file(root / paths.LEASE_FOLDER / _NAME, marker.to_json())


def read(root: Path, manifest: Manifest | None) -> Any:
    """The request that the run finished with this checkpoint; None if the run was not finished with it."""
    if manifest is None:
        return None
    path = root / paths.LEASE_FOLDER / _NAME
    try:
        marker = FinishedMarker.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is not readable, so the run counts as not finished: %s", path, error)
        return None
    return marker.request if marker.refers_to(manifest) else None
