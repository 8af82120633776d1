"""Replaces functions of other libraries for a while, and names the arguments of a call to them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace an attribute of an instance (its class stays as it is) or of a module."""
    before = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def hooked(owner: Any, hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods of an instance. Each hook gets the original method as its first argument."""
    with contextlib.ExitStack() as stack:
        for name, hook in hooks.items():
            original = getattr(owner, name)
            # Callers look at the name and the signature.
            replacement = functools.wraps(original)(functools.partial(hook, original))
            stack.enter_context(patched(owner, name, replacement))
        yield


def call_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    return {**dict(zip(inspect.signature(function).parameters, args, strict=False)), **kwargs}
