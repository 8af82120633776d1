"""What a cluster could leave on a machine: taken before `up` and after `down`, the two must be equal.

Only what is outside of namespaces counts. Names of other clusters that are up meanwhile do not disturb: they are there
before and after.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster.rig.cgroups import mounted_hierarchies
from tests.cluster.rig.down import mounts_below, processes_of
from tests.cluster.rig.layout import STATE, Instance
from tests.cluster.rig.nodes import PRIVATE_FOLDERS
from tests.cluster.rig.prerequisites import find_command


def machine_state() -> set[str]:
    """Links, bridges, iptables chains and rules, network namespaces, mounts, cgroups and folders of the host."""
    links = [line.split(": ")[1] for line in _output("ip", "-oneline", "link").splitlines()]
    rules = [line for line in _output("iptables-save").splitlines() if line.startswith((":", "-A"))]
    namespaces = [line.split()[0] for line in _output("ip", "netns", "list").splitlines()]
    mounts = mounts_below(Path("/"))
    cgroups = [str(path) for hierarchy in mounted_hierarchies() for path in hierarchy.iterdir() if path.is_dir()]
    folders = [path for path in (*PRIVATE_FOLDERS, "/etc/cni", str(STATE)) if Path(path).exists()]
    kinds = {
        "link": links,
        "iptables": [rule.partition(" [")[0] for rule in rules],
        "network namespace": namespaces,
        "mount": mounts,
        "cgroup": cgroups,
        "folder": folders,
    }
    return {f"{kind} {name}" for kind, names in kinds.items() for name in names}


def processes_with(instance: Instance) -> list[str]:
    """Processes of a cluster: by its cgroup, its network namespace, or its state folder in the command line."""
    found = [str(pid) for pid in processes_of(instance)]
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                mounts = (folder / "mountinfo").read_text()
            except OSError:
                continue
            if any(f"{instance.state}/" in argument for argument in command) or f"{instance.state}/" in mounts:
                found.append(f"{folder.name} {' '.join(command)}")
    return found


def _output(*command: str) -> str:
    program = find_command(command[0])
    assert program is not None, command
    return subprocess.run([program, *command[1:]], capture_output=True, text=True, check=True).stdout
