"""Calls functions when certain modules are imported, before whoever imports them can use them.

A finder on sys.meta_path lets the other finders find such a module, and calls its function after the module was
executed. Any other module costs one lookup in a dict. Functions are given by name, `package.module:function`, so that
nothing is imported that is not used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def call_when_imported(functions: Mapping[str, str]) -> None:
    """Call each module's function once it is imported; now, for those that are imported already."""
    pending = dict(functions)
    for name in [name for name in pending if name in sys.modules]:
        _call(pending.pop(name), sys.modules[name])
    sys.meta_path.insert(0, _Finder(pending))


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
