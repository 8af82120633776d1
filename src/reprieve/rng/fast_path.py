"""A fast path for reading the states of Python's and numpy's global random number generators.

The data loaders read both states for every batch, and most batches draw nothing from them. Reading a state takes 20 to
45 µs; this module compares 64 bytes of the generator's memory instead, which takes 1 µs, and returns the previous state
if they are unchanged. The memory is the Mersenne Twister inside CPython's `random.Random` and numpy's `MT19937`. Any
other implementation is read the plain way.

`REPRIEVE_FAST_RNG=0` turns the fast path off: `reprieve.rng` then always reads the states the plain way.

One change goes unnoticed: a foreign `np.random.set_state` that alters nothing but numpy's pending normal number.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

ENABLED = os.environ.get("REPRIEVE_FAST_RNG") != "0"

_WORDS = 624
"""The words of a Mersenne Twister's state. CPython stores the index of the next word before them, numpy behind them."""
_COMPARED_BYTES = 64
"""The index and the words beside it. The index changes with each number that is drawn, and all words change when it
wraps around. To compare all words, which are in no cache after a training step, takes 10 µs more."""


class _CachedState:
    """The state of a generator as it was last read, valid while the generator's memory stays the same."""

    def __init__(self, generator: Any, address: int) -> None:
        """`address`: of the bytes to compare."""
        self.generator = generator
        self._memory = (ctypes.c_char * _COMPARED_BYTES).from_address(address)
        self._seen, self._state = b"", None

    def get(self, read: Callable[[], Any], has_pending: Callable[[Any], object]) -> Any:
        """Return the state, from `read` if the memory has changed.

        A generator makes normal numbers in pairs. Its memory does not show whether the second one is pending, so a
        state for which `has_pending` is true is not cached.
        """
        seen = self._memory.raw
        if seen != self._seen:
            self._state = read()
            self._seen = b"" if has_pending(self._state) else seen
        return self._state

    def invalidate(self) -> None:
        self._seen = b""


_numpy_cache: _CachedState | None = None


def python_state() -> Any:
    """Return `random.getstate()`."""
    cached = _python_cache()
    if cached is None or random._inst.gauss_next is not None:  # type: ignore[attr-defined]
        return random.getstate()
    return cached.get(random.getstate, lambda _state: False)


def numpy_state(read: Callable[[], Any]) -> Any:
    """Return `read()`, the state of numpy's global generator. Field 3 of an MT19937's is its pending-number flag."""
    global _numpy_cache  # noqa: PLW0603
    import numpy as np

    if not hasattr(np.random, "get_bit_generator"):  # before numpy 1.24
        return read()
    generator = np.random.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return read()
    if _numpy_cache is None or _numpy_cache.generator is not generator:
        end = generator.ctypes.state_address + 4 * (_WORDS + 1)
        _numpy_cache = _CachedState(generator, end - _COMPARED_BYTES)
    return _numpy_cache.get(read, lambda state: state[3])


def invalidate_numpy() -> None:
    """Read numpy's state the next time, even if its words are the same: the pending number may be another one."""
    if _numpy_cache is not None:
        _numpy_cache.invalidate()


@cache
def _python_cache() -> _CachedState | None:
    """Return None if the words are not where CPython stores them."""
    generator = random._inst
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + 4 * (1 + _WORDS):
        return None
    address = id(generator) + object.__basicsize__
    index, *words = (ctypes.c_uint32 * (1 + _WORDS)).from_address(address)
    return _CachedState(generator, address) if (*words, index) == random.getstate()[1] else None
