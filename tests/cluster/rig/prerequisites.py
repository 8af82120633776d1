"""What the machine must have: Linux, root, Go for the build, and Debian packages, which are installed if missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster.rig.console import report
from tests.cluster.rig.errors import RigError
from tests.cluster.rig.versions import MINIMUM_GO

CNI_PLUGINS = Path("/usr/lib/cni")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Non-login shells often lack the sbin folders, where iptables and debootstrap are."""

PACKAGES = {
    "runc": "runc",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
    "openssl": "openssl",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mount": "mount",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
}
"""Command, and the Debian package that contains it."""


def find_command(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")


def check_machine() -> None:
    """Raise a `RigError` that names what is missing and how to get it; install Debian packages where possible."""
    if sys.platform != "linux":
        raise RigError(f"the test cluster needs Linux, and this is {sys.platform}: {other_cluster_hint()}")
    if os.geteuid() != 0:
        raise RigError(f"the test cluster needs root (namespaces, mounts, cgroups): use sudo; {other_cluster_hint()}")
    install_packages(missing_packages())


def install_packages(packages: list[str]) -> None:
    """Install Debian packages, or raise a `RigError` that names them."""
    if not packages:
        return
    install = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
    if find_command("apt-get") is None:
        raise RigError(f"missing programs; on Debian they come with: {install}")
    report(f"installing {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ("apt-get update", install):
        done = subprocess.run(command.split(), env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RigError(f"`{command}` failed, run it by hand:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def missing_packages() -> list[str]:
    return sorted({package for command, package in PACKAGES.items() if find_command(command) is None})


def check_go() -> None:
    wanted = ".".join(map(str, MINIMUM_GO))
    if shutil.which("go") is None:
        raise RigError(f"building the cluster needs Go {wanted} or newer in PATH: see go.dev/dl")
    version = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True).stdout.strip()
    numbers = re.match(r"go(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < MINIMUM_GO:
        raise RigError(f"building the cluster needs Go {wanted} or newer, found {version}: see go.dev/dl")


def other_cluster_hint() -> str:
    return "or give the tests another cluster with REPRIEVE_TEST_KUBECONFIG"
