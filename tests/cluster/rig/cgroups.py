"""The cgroup that marks every process of a cluster, from the first one that `up` starts to the last one in a pod.

`up` enters the cgroup before it starts anything, its children inherit it, and the kubelet makes the cgroups of pods
below it. So the kernel knows what belongs to a cluster, even if `up` was killed before it could write anything down.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from tests.cluster.rig.errors import RigError
from tests.cluster.rig.layout import Instance

REMOVE_WITHIN_S = 10
"""A cgroup is busy until the kernel has reaped the last process in it: usually some milliseconds."""


def mounted_hierarchies() -> dict[Path, str]:
    """Mount points of cgroup hierarchies, and their type: `cgroup2`, or `cgroup` for one of version 1."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return {Path(fields[1]): fields[2] for fields in mounts if fields[2] in ("cgroup", "cgroup2")}


def is_version_1() -> bool:
    """Whether controllers are in hierarchies of version 1, which the kubelet must be told to accept."""
    return not Path("/sys/fs/cgroup/cgroup.controllers").exists()


def enter(instance: Instance) -> None:
    """Put this process into the cluster's cgroup."""
    hierarchies = mounted_hierarchies()
    version_2 = [path for path, kind in hierarchies.items() if kind == "cgroup2"]
    version_1 = [path for path in hierarchies if path.name in ("pids", "systemd")]
    if not version_2 + version_1:
        raise RigError("no cgroup hierarchy is mounted below /sys/fs/cgroup: the test cluster needs one")
    # A leaf: with version 2, processes can be in leaves only.
    folder = (version_2 + version_1)[0] / instance.cgroup / "host"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def make_node_cgroup(instance: Instance, node: str) -> str:
    """The cgroup that a kubelet uses as its root. It must exist in every hierarchy before the kubelet starts."""
    path = f"{instance.cgroup}/{node}"
    for hierarchy in mounted_hierarchies():
        (hierarchy / path).mkdir(parents=True, exist_ok=True)
        if hierarchy.name == "cpuset":
            # A new cpuset of version 1 is empty, and no process can enter it.
            for folder in (hierarchy / instance.cgroup, hierarchy / path):
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (folder / name).write_text((folder.parent / name).read_text())
    return f"/{path}"


def member_pids(instance: Instance) -> list[int]:
    """The processes of the cluster, except this one."""
    processes = (folder for folder in Path("/proc").iterdir() if folder.name.isdigit())
    members = [int(folder.name) for folder in processes if _is_member(folder, instance.cgroup)]
    return [pid for pid in members if pid != os.getpid()]


def find_processes(instance: Instance, program: str, argument: str) -> list[int]:
    """The processes of the cluster that run a program with the given argument."""
    found = []
    for pid in member_pids(instance):
        with contextlib.suppress(OSError):
            executable = Path(f"/proc/{pid}/exe").readlink().name
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if executable == program and argument in arguments:
                found.append(pid)
    return found


def _is_member(process: Path, cgroup: str) -> bool:
    """Whether a living process is in the cgroup. A zombie has no executable, and needs no killing."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
        (process / "exe").readlink()
    except OSError:
        return False
    paths = (line.split(":", 2)[2] for line in lines)
    return any(path == f"/{cgroup}" or path.startswith(f"/{cgroup}/") for path in paths)


def cgroup_folders(instance: Instance) -> list[Path]:
    """The cluster's folders in all hierarchies."""
    folders = (hierarchy / instance.cgroup for hierarchy in mounted_hierarchies())
    return [folder for folder in folders if folder.is_dir()]


def remove(instance: Instance) -> None:
    """Remove the cluster's cgroups, whose processes have ended by now."""
    deadline = time.monotonic() + REMOVE_WITHIN_S
    while folders := cgroup_folders(instance):
        for top in folders:
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        if time.monotonic() > deadline:
            raise RigError(f"cannot remove cgroups that are still busy: {', '.join(map(str, folders))}")
        time.sleep(0.05)
