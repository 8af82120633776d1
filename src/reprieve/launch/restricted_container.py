"""What a command needs and a restricted container may not have: a folder for temporary files, a name of its user.

Pods often have a read-only root file system, no volume for /tmp, and a uid that no passwd entry names. The launcher
itself then works in /dev/shm (`launcher_protocol.Listener`) and leaves out the run record. The processes that it starts
would fail: torchrun creates temporary folders, torch and others ask for the name of the user.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import MutableMapping
from pathlib import Path

from reprieve.launch.messages import print_message
from reprieve.launcher_protocol import TEMPORARY_FOLDERS

_USER_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Where Python's getpass.getuser looks before it needs a passwd entry."""


def add_missing(env: MutableMapping[str, str], scratch: Path) -> None:
    """Add what is missing to the environment of a command. `scratch`: a folder that the launcher removes at its end."""
    usual = (env.get("TMPDIR"), *TEMPORARY_FOLDERS)
    if not any(folder and os.access(folder, os.W_OK) for folder in usual):
        print_message(f"{' and '.join(TEMPORARY_FOLDERS)} cannot be written: temporary files go to {scratch}")
        env["TMPDIR"] = str(scratch)
    if not _has_passwd_entry() and not any(env.get(name) for name in _USER_NAMES):
        env["LOGNAME"] = f"uid-{os.getuid()}"


def _has_passwd_entry() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True
