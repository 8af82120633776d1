"""The note that a run is finished: `.reprieve/finished.json`, beside the owner record.

Written when its last step is durable. A rerun that resumes from that step then knows that there is nothing left to
do; a note that is older than the checkpoint it would speak of (the run was started over, or went on) says nothing.
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


def write(disk: Disk, root: Path, owner: FolderLease, step: int, request: Any) -> None:
    """`request`: what there was to do, so that a rerun that is asked for more can tell."""
    note = {"run": owner.run, "attempt": owner.attempt, "step": step, "asked": request}
    with owner.committing():
        disk.replace_file(root / paths.OWNER_FOLDER / _NAME, json.dumps(note).encode() + b"\n")


def read(root: Path, manifest: Manifest | None) -> Any:
    """What was asked for and done, if the run that saved this checkpoint was finished with it; else None."""
    if manifest is None:
        return None
    try:
        note = json.loads((root / paths.OWNER_FOLDER / _NAME).read_bytes())
        same = (note["run"], note["step"]) == (manifest.run, manifest.step) and note["attempt"] >= manifest.attempt
        return note["asked"] if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or not readable: then the run goes on, and finds out by itself
