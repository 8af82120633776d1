"""The import hook that protects unmodified scripts: it calls functions when certain modules are imported.

`reprieve run` puts a folder with a `sitecustomize.py` (site/) first on PYTHONPATH. That file calls `install` in each
Python process that the command starts, for the modules in `WHEN_IMPORTED` (`import_hooks.py`). The workers and services
of Ray are the exception: they belong to the driver, which alone reports to the launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path
from types import FrameType, ModuleType

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
_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)


def add_to(env: MutableMapping[str, str]) -> None:
    """Add the hook to the environment of a command."""
    others = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(HOOK)]
    env["PYTHONPATH"] = os.pathsep.join([str(HOOK), *others])


def install(table: dict[str, str] | None = None) -> None:
    """Install the hook in this process, unless that is a process of Ray."""
    if not any(part in argument for argument in sys.orig_argv[1:3] for part in _OF_RAY):
        call_when_imported(WHEN_IMPORTED if table is None else table)


def report_torch(module: ModuleType) -> None:
    """Report the import of torch: the launcher warns about scripts that train without protection."""
    from reprieve.launcher_protocol import TorchImported, send_once

    send_once(TorchImported(undecided=not _PROTECTING.isdisjoint(_imported_by_script())))


def report_protected(module: ModuleType) -> None:
    """Report that the script has loaded what protects its training."""
    from reprieve.launcher_protocol import Protected, send_once

    send_once(Protected())


def _imported_by_script() -> set[str]:
    """Return the packages in the import statements of the script and of its modules that are being imported.

    There is no other way to see `import reprieve`: this hook has imported it before, and `reprieve.Run` is only loaded
    at its first use, perhaps after an hour of preparing data.
    """
    found: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found.update(_IMPORT.findall(Path(frame.f_code.co_filename).read_text(encoding="utf-8")))
        frame = frame.f_back
    return found
