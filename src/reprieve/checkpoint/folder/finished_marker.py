"""The marker that a run is finished: `.reprieve/finished.json`, beside the lease record.

It is written when the last step is durable. A rerun that resumes from that step reads it and has nothing left to do. A
marker that is older than the checkpoint (the run was started over, or continued) is ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.folder.lease import FolderLease
from reprieve.checkpoint.format.manifest import Manifest
from reprieve.storage.disk import Disk

_NAME = "finished.json"


def write(disk: Disk, root: Path, lease: FolderLease, step: int, request: Any) -> None:
    """Mark the run as finished with this step. `request`: how much training was requested, for a rerun that requests
    more."""
    marker = {"run": lease.run, "attempt": lease.attempt, "step": step, "asked": request}
    with lease.committing():
        disk.replace_file(root / paths.LEASE_FOLDER / _NAME, json.dumps(marker).encode() + b"\n")


def read(root: Path, manifest: Manifest | None) -> Any:
    """The request that the run finished with this checkpoint; None if the run was not finished with it."""
    if manifest is None:
        return None
    try:
        marker = json.loads((root / paths.LEASE_FOLDER / _NAME).read_bytes())
        same = (marker["run"], marker["step"]) == (manifest.run, manifest.step) and marker[
            "attempt"
        ] >= manifest.attempt
        return marker["asked"] if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or not readable: the run resumes and finds out by itself that nothing is left
