"""The hook by which scripts are protected that know nothing of us: something happens when a module is imported.

`reprieve run` puts a folder with a `sitecustomize.py` (site/) before all else on PYTHONPATH; that calls `install` in
each Python process it starts, which adds one finder to sys.meta_path. It finds nothing itself: for a module in the
table it lets the others find it, and does what the table says when it has been executed. For any other it is one
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
"""Module → what is called with it. By name: what is never used is never imported."""
_PROTECTING = {"reprieve", "transformers", "trl"}
"""A script that imports one of them may protect its training with it; or use it for something else."""
_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)


def add_to(env: MutableMapping[str, str]) -> None:
    """The environment of a command, so that Python processes in it come here."""
    others = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(HOOK)]
    env["PYTHONPATH"] = os.pathsep.join([str(HOOK), *others])


def install(table: dict[str, str] | None = None) -> None:
    """In this process. Modules that are there already are seen at once."""
    waiting = dict(WHEN_IMPORTED if table is None else table)
    for name in [name for name in waiting if name in sys.modules]:
        _call(waiting.pop(name), sys.modules[name])
    sys.meta_path.insert(0, _Finder(waiting))


def report_torch(module: ModuleType) -> None:
    """The launcher would like to know who trains, and is not protected."""
    from reprieve.launcher_protocol import TorchImported, send_once

    send_once(TorchImported(undecided=not _PROTECTING.isdisjoint(_imported_by_script())))


def report_protected(module: ModuleType) -> None:
    """The script has loaded what it will train with."""
    from reprieve.launcher_protocol import Protected, send_once

    send_once(Protected())


def _imported_by_script() -> set[str]:
    """The packages that the script, and its modules that are just being imported, name in import statements.

    `import reprieve` cannot be seen in any other way: this hook has imported it before, and `reprieve.Run` is loaded
    when it is first used, perhaps after an hour of preparing data.
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
    """On sys.meta_path, before all others."""

    def __init__(self, waiting: dict[str, str]) -> None:
        self._waiting = waiting

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, partial(self._executed, name))  # type: ignore[assignment]
                return spec
        return None

    def _executed(self, name: str, module: ModuleType) -> None:
        """Once: only now, since many look whether there is such a module and never import it."""
        if (then := self._waiting.pop(name, None)) is not None:
            _call(then, module)


class _Loader:
    """Around the real one; after it, what the table says."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module must not see that we were here: `__loader__` is asked for resources, source and pickling.
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
