"""One live run for each of Ray's run folders: two with the same name would write each other's checkpoints and snapshot.

The controller holds the lease of a folder of its own in the run folder, from its start to its end. To the lease, each
`fit()` is another run, so a second live one is refused. A dead holder does not count: on this host its lock is free at
once, on another one its heartbeat stands still (`lease.py`).
"""

from __future__ import annotations

import logging
import uuid
from datetime import timedelta
from pathlib import Path

from reprieve.checkpoint.folder.lease import FolderLease, acquire, read_record
from reprieve.checkpoint.folder.paths import LEASE_FOLDER
from reprieve.checkpoint.folder.startup import make_root
from reprieve.clock import Clock, SystemClock
from reprieve.errors import FolderInUse
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

FOLDER = "reprieve-driver"
"""The folder of the lease. Not the run folder itself, nor the one of our checkpoints: their leases belong to sessions
in the workers."""
_WAIT = timedelta(seconds=15)
"""How long to wait for another live run to end. A controller outlives a killed driver by a few seconds."""
_RETRY_S = 0.5


def claim_run_folder(folder: Path, *, clock: Clock | None = None) -> FolderLease | None:
    """Claim Ray's folder of a run for this controller. None: the folder cannot hold a lease, and nobody is refused."""
    clock, disk = clock or SystemClock(), Disk()
    run = uuid.uuid4().hex
    root = folder / FOLDER
    give_up_at = clock.monotonic() + _WAIT.total_seconds()
    logged = False
    while True:
        try:
            make_root(disk, root)
            return acquire(disk, root, run, wait=timedelta(0), clock=clock)
        except FolderInUse as error:
            holder = _holder(root)
            if clock.monotonic() >= give_up_at:
                raise FolderInUse(
                    f"{folder} is in use by another live run of this name ({holder}). Stop that run first, or use "
                    "another RunConfig(name=…) or storage_path"
                ) from error
        except OSError as error:
            log.warning("%s cannot be claimed for this run: %s. Do not start it twice at the same time", folder, error)
            return None
        if not logged:
            log.warning("%s is in use by %s: waiting up to %s for it to end", folder, holder, _WAIT)
            logged = True
        clock.sleep(_RETRY_S)


def _holder(root: Path) -> str:
    record = read_record(root / LEASE_FOLDER)
    return "a process that starts now" if record is None else f"process {record.pid} on {record.host}"
