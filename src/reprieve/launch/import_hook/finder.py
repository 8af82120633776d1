"""The import hook that protects unmodified scripts: it calls functions when certain modules are imported.

`reprieve run` puts a folder with a `sitecustomize.py` (site/) first on PYTHONPATH. That file calls `install` in each
Python process that the command starts, for the modules in `WHEN_IMPORTED` (`import_hooks.py`). The workers and services
of Ray are the exception: they belong to the driver, which alone reports to the launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType

from reprieve.import_hooks import call_when_imported

HOOK = Path(__file__).with_name("site")

WHEN_IMPORTED: dict[str, str] = {
    "torch": "reprieve.launch.import_hook.finder:report_torch",
    "transformers.trainer": "reprieve.adapters.transformers.all_trainers:protect_all",
    "reprieve.adapters.loop.run": "reprieve.launch.import_hook.finder:report_protected",
    "reprieve.checkpoint.checkpointer": "reprieve.launch.import_hook.finder:report_protected",
    "torch.distributed.elastic.multiprocessing.api": "reprieve.launch.import_hook.rank_launchers:watch_torchrun",
    "accelerate.commands.launch": "reprieve.launch.import_hook.rank_launchers:watch_accelerate",
    "ray.train": "reprieve.adapters.ray.all_trainers:protect_all",
}
"""Module → the function to call with it. By name, so that nothing is imported that is not used."""
_PROTECTING = {"reprieve", "transformers", "trl", "ray"}
"""A script that imports one of these may protect its training with it, or use it for something else."""
_OF_RAY = ("/ray/_private/", "/ray/dashboard/")
"""In the paths of the scripts that Ray starts."""
_RANK_LAUNCHERS = {"torchrun", "torch.distributed.run", "accelerate", "accelerate.commands.launch"}
"""Programs and modules that import torch and train nothing. Their ranks may import it a minute later."""


def add_to(env: MutableMapping[str, str]) -> None:
    """Add the hook to the environment of a command."""
    others = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(HOOK)]
    env["PYTHONPATH"] = os.pathsep.join([str(HOOK), *others])


def install(table: dict[str, str] | None = None) -> None:
    """Install the hook in this process, unless that is a process of Ray."""
    if not any(part in argument for argument in _program() for part in _OF_RAY):
        call_when_imported(WHEN_IMPORTED if table is None else table)


def report_torch(module: ModuleType) -> None:
    """Report the import of torch: the launcher warns about scripts that train without protection."""
    if any(Path(argument).name in _RANK_LAUNCHERS for argument in _program()):
        return
    from reprieve.launch.import_hook.script_imports import imported_packages, own_folders, running_files
    from reprieve.launcher_protocol import TorchImported, send_once

    packages = imported_packages(running_files(), own_folders())
    send_once(TorchImported(undecided=any(package in _PROTECTING for package in packages)))


def report_protected(module: ModuleType) -> None:
    """Report that the script has loaded what protects its training."""
    from reprieve.launcher_protocol import Protected, send_once

    send_once(Protected())


def _program() -> list[str]:
    """Return the arguments of Python that name the program: a script, or -m and a module."""
    return sys.orig_argv[1:3]
