"""`down`: removes a cluster completely, whatever state it is in.

It works from what the machine shows, not from a record of what `up` did: the processes in the cluster's cgroup, its
network namespace, its state folder. So it also removes what a killed `up` has left, and running it twice does no harm.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from tests.cluster.rig import cgroups, network
from tests.cluster.rig.console import report
from tests.cluster.rig.errors import RigError
from tests.cluster.rig.layout import CACHE, STATE, Instance
from tests.cluster.rig.nodes import remove_mount_points

END_WITHIN_S = 20


def remove_cluster(instance: Instance) -> None:
    """Kill the processes of a cluster and remove everything that it has made."""
    _kill_all(instance)
    network.remove(instance)
    cgroups.remove(instance)
    if mounts := mounts_below(instance.state):
        # Never delete below a mount: it may show a folder of the host.
        raise RigError(f"still mounted, and therefore not removed: {', '.join(mounts)}")
    shutil.rmtree(instance.state, ignore_errors=True)
    if STATE.is_dir() and not any(STATE.iterdir()):
        STATE.rmdir()
        remove_mount_points()


def stop(instance: Instance) -> None:
    began = time.monotonic()
    remove_cluster(instance)
    report(f"cluster {instance.name}: removed in {time.monotonic() - began:.1f} s")


def mounts_below(folder: Path) -> list[str]:
    points = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
    return [point for point in points if Path(point).is_relative_to(folder)]


def processes_of(instance: Instance) -> list[int]:
    """Processes in the cluster's cgroup, and clients of ours (kubectl) in its network namespace."""
    return sorted({*cgroups.member_pids(instance), *_clients_in_namespace(instance)})


def _kill_all(instance: Instance) -> None:
    """Kill until nothing is left: a process may start another one between two looks."""
    deadline = time.monotonic() + END_WITHIN_S
    while pids := processes_of(instance):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RigError(f"processes {pids} do not end {END_WITHIN_S} s after SIGKILL")
        time.sleep(0.05)


def _clients_in_namespace(instance: Instance) -> list[int]:
    if not instance.network_namespace_file.exists():
        return []
    wanted = instance.network_namespace_file.stat().st_ino
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if (folder / "ns" / "net").stat().st_ino == wanted and (folder / "exe").readlink().is_relative_to(CACHE):
                found.append(int(folder.name))
    return found
