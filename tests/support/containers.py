"""Runs a command as a restricted container would: read-only root file system, a uid without a name, no HOME.

In a mount namespace of its own, which ends with the command. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.places import ROOT

UID = 54321
"""Has no passwd entry."""
_SCRIPT = """
set -e
writable=$1 read_only=$2 uid=$3; shift 3
mount --make-rprivate /
# Other users may not enter the home folder of root. What Python needs of it is mounted into an empty one.
mount -t tmpfs -o mode=755 tmpfs /mnt
number=0
for path in $NEEDED; do
    case $path in /root/*) number=$((number + 1)); mkdir /mnt/$number; mount --bind $path /mnt/$number;; esac
done
mount -t tmpfs -o mode=755 tmpfs /root
number=0
for path in $NEEDED; do
    case $path in /root/*) number=$((number + 1)); mkdir -p $path; mount --bind /mnt/$number $path;; esac
done
mount --bind $writable $writable
if [ $read_only = yes ]; then
    mount -o remount,bind,ro /
    mount -o remount,ro /root
    mount -o remount,ro /mnt
fi
unset NEEDED
cd /
exec setpriv --reuid $uid --regid $uid --clear-groups "$@"
"""


def why_not() -> str | None:
    """Return what a restricted container needs and this machine does not have; None: it can be made."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("setpriv") is None or shutil.which("unshare") is None:
        return "needs setpriv and unshare"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "needs mount namespaces"
    return None


def restricted(command: Sequence[str], *, writable: Path, read_only: bool = True, uid: int = UID) -> list[str]:
    """Return the command in a container. `writable`: the folder that a volume is mounted at. Its working directory is
    the root folder, and HOME is not set."""
    needed = " ".join({sys.base_prefix, sys.prefix, str(ROOT)})
    variables = ["env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME", "-u", "TMPDIR", f"NEEDED={needed}"]
    shell = ["bash", "-c", _SCRIPT, "bash", str(writable), "yes" if read_only else "no", str(uid)]
    return [*variables, "unshare", "--mount", *shell, *command]
