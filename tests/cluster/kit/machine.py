"""What a cluster could leave on a machine: listed before `up` and after `down`, it must be the same.

Other clusters and other tests may come and go meanwhile. So the list leaves out names of other clusters, and mounts in
the folder for temporary files.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.cluster.rig.cgroups import mounted_hierarchies
from tests.cluster.rig.down import mounts_below, processes_of
from tests.cluster.rig.layout import STATE, Instance
from tests.cluster.rig.nodes import PRIVATE_FOLDERS
from tests.cluster.rig.prerequisites import find_command


def machine_state(instance: Instance) -> set[str]:
    """Links, bridges, iptables rules, network namespaces, mounts, cgroups and folders of the host."""
    rules = [line for line in _output("iptables-save").splitlines() if line.startswith((":", "-A"))]
    found = {
        "link": [line.split(": ")[1] for line in _output("ip", "-oneline", "link").splitlines()],
        "iptables": [rule.partition(" [")[0] for rule in rules],
        "network namespace": [line.split()[0] for line in _output("ip", "netns", "list").splitlines()],
        "mount": [path for path in mounts_below(Path("/")) if not path.startswith(tempfile.gettempdir())],
        "cgroup": [str(path) for hierarchy in mounted_hierarchies() for path in hierarchy.iterdir() if path.is_dir()],
        "folder": [path for path in (str(instance.state), *_shared_folders(instance)) if Path(path).exists()],
    }
    return {
        f"{kind} {name}"
        for kind, names in found.items()
        for name in names
        if "reprieve-" not in name or instance.name in name
    }


def _shared_folders(instance: Instance) -> list[str]:
    """Folders that the last cluster removes; while there are other clusters, they are theirs."""
    others = [path for path in STATE.iterdir() if path != instance.state] if STATE.exists() else []
    return [] if others else [str(STATE), *PRIVATE_FOLDERS]


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
