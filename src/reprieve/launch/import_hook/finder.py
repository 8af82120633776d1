"""The import hook that protects unmodified scripts: it calls functions when certain modules are imported.

`reprieve run` puts a folder with a `sitecustomize.py` (site/) first on PYTHONPATH. That file calls `install` in each
Python process that the command starts, which adds a finder to sys.meta_path. For a module in `WHEN_IMPORTED` the finder
lets the other finders find it, and calls the table's function after the module was executed. Any other module costs one
lookup in a dict.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

HOOK = Path(__file__).with_name("site")

WHEN_IMPORTED: dict[str, str] = {
    "torch": "reprieve.launch.import_hook.finder:report_torch",
    "transformers.trainer": "reprieve.adapters.transformers.all_trainers:protect_all",
    "reprieve.adapters.loop.run": "reprieve.launch.import_hook.finder:report_protected",
    "reprieve.checkpoint.checkpointer": "reprieve.launch.import_hook.finder:report_protected",
    "torch.distributed.elastic.multiprocessing.api": "reprieve.launch.import_hook.rank_launchers:watch_torchrun",
    "accelerate.commands.launch": "reprieve.launch.import_hook.rank_launchers:watch_accelerate",
}
"""Module → the function to call with it. By name, so that nothing is imported that is not used."""
_PROTECTING = {"reprieve", "transformers", "trl"}
"""A script that imports one of these may protect its training with it, or use it for something else."""
_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)


def add_to(env: MutableMapping[str, str]) -> None:
    """Add the hook to the environment of a command."""
    others = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(HOOK)]
    env["PYTHONPATH"] = os.pathsep.join([str(HOOK), *others])


def install(table: dict[str, str] | None = None) -> None:
    """Install the hook in this process. For modules that are imported already, it calls their functions now."""
    pending = dict(WHEN_IMPORTED if table is None else table)
    for name in [name for name in pending if name in sys.modules]:
        _call(pending.pop(name), sys.modules[name])
    sys.meta_path.insert(0, _Finder(pending))


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


class _Finder:
    """The first finder on sys.meta_path."""

    def __init__(self, pending: dict[str, str]) -> None:
        self._pending = pending

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._pending:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, partial(self._executed, name))  # type: ignore[assignment]
                return spec
        return None

    def _executed(self, name: str, module: ModuleType) -> None:
        """Call the module's function, once. Not in `find_spec`: libraries look for modules that they never import."""
        if (function := self._pending.pop(name, None)) is not None:
            _call(function, module)


class _Loader:
    """Wraps the loader of a module, and calls a function after the module was executed."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module must keep its own loader: `__loader__` serves resources, source code and pickling.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _call(target: str, module: ModuleType) -> None:
    where, _, name = target.partition(":")
    function: Callable[[ModuleType], object] = getattr(import_module(where), name)
    function(module)
