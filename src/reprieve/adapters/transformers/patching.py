"""Functions of somebody else's: replaced for a while, and what they are called with."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    """`owner`: an instance, whose class goes on having it, or a module."""
    before = vars(owner).get(name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def given(real: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call, by name."""
    return {**dict(zip(inspect.signature(real).parameters, args, strict=False)), **kwargs}
