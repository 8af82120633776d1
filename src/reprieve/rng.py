"""The random number generators of one process, as tensors, integers and tuples that `weights_only` loads.

The file has the keys that transformers uses (`python`, `numpy`, `cpu`, `cuda`), plus the generators that the user gave.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from reprieve.errors import StateMismatch


class RngSnapshot(NamedTuple):
    """The global generators, raw: quick to take, to compare and to pickle. `plain` is what goes into files."""

    python: Any
    cpu: bytes | torch.Generator
    numpy: Any
    """None: nobody has imported it."""
    cuda: tuple[bytes | torch.Tensor, ...] | None
    """None: not in use."""

    def plain(self) -> dict[str, Any]:
        """What `capture_rng` gives and `restore_rng` takes."""
        state: dict[str, Any] = {"python": self.python, "cpu": _tensor(self.cpu)}
        if self.numpy is not None:
            state["numpy"] = self.numpy
            if isinstance(self.numpy, tuple):
                name, key, *rest = self.numpy
                state["numpy"] = (name, list(memoryview(key).cast("I")), *rest)
        if self.cuda is not None:
            state["cuda"] = [_tensor(one) for one in self.cuda]
        return state


def snapshot_rng(*, as_bytes: bool = True) -> RngSnapshot:
    """`as_bytes`: to be compared or pickled. Without, it takes half as long."""
    generator, cuda = torch.default_generator, None
    if torch.cuda.is_initialized():
        cuda = tuple(torch.cuda.get_rng_state_all())
    return RngSnapshot(
        _python_state(),
        _bytes(generator.get_state()) if as_bytes else generator.clone_state(),
        _numpy_state() if "numpy" in sys.modules else None,
        tuple(map(_bytes, cuda)) if as_bytes and cuda is not None else cuda,
    )


def capture_rng(generators: Mapping[str, torch.Generator], *, everything: bool = True) -> dict[str, Any]:
    """A copy of every generator's state; nothing is drawn from them. Without `everything`, only of the given ones."""
    state: dict[str, Any] = {}
    if everything:
        state = snapshot_rng().plain()
    if generators:
        state["generators"] = {name: generator.get_state() for name, generator in generators.items()}
    return state


def check_rng(state: Mapping[str, Any], generators: Mapping[str, torch.Generator], *, everything: bool = True) -> None:
    """Raise StateMismatch if `restore_rng` would."""
    saved = set(state.get("generators", {}))
    if saved != set(generators):
        raise StateMismatch(f"the checkpoint has the generators {sorted(saved)}, this run has {sorted(generators)}")
    if everything and "cuda" in state:
        count = len(_cuda_states(state))
        if count != torch.cuda.device_count():
            raise StateMismatch(
                f"the checkpoint has the RNG of {count} GPUs, this process sees {torch.cuda.device_count()}. "
                "Run on as many, or with rng=False"
            )


def restore_rng(
    state: Mapping[str, Any], generators: Mapping[str, torch.Generator], *, everything: bool = True
) -> None:
    for name, generator in generators.items():
        generator.set_state(state["generators"][name])
    if not everything:
        return
    if "python" in state:
        version, keys, gauss = state["python"]
        random.setstate((version, tuple(keys), gauss))
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "numpy" in state:
        _restore_numpy(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(_cuda_states(state))


def _cuda_states(state: Mapping[str, Any]) -> list[torch.Tensor]:
    cuda = state["cuda"]
    return [cuda] if isinstance(cuda, torch.Tensor) else list(cuda)


_WORDS = 624
"""Of a Mersenne Twister. Python has the place among them before, numpy behind them."""
_LOOK_BYTES = 64
"""At the place and the words beside it: the place changes with each number that is drawn, and all words with each 624.
To look at all of them, which are in no cache after a step, takes 10 µs more."""


class _Seen:
    """A generator where it lies in memory, and what its state was when that was last read. To read a state takes 20 to
    45 µs, to see that nothing was drawn since takes 1. (What lies there does not tell whether the second half of a
    pair of normal numbers waits, so that such a state is always read.)"""

    def __init__(self, generator: Any, address: int) -> None:
        """`address`: what to look at."""
        self.generator = generator
        self._memory = (ctypes.c_char * _LOOK_BYTES).from_address(address)
        self._words, self._state = b"", None

    def state(self, read: Callable[[], tuple[Any, bool]]) -> Any:
        """`read`: the state, and whether half of a pair waits."""
        words = self._memory.raw
        if words != self._words:
            self._state, waits = read()
            self._words = b"" if waits else words
        return self._state

    def forget(self) -> None:
        self._words = b""


def _python_words() -> _Seen | None:
    """None: not where CPython has them."""
    generator = random._inst
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + 4 * (1 + _WORDS):
        return None
    address = id(generator) + object.__basicsize__
    place, *words = (ctypes.c_uint32 * (1 + _WORDS)).from_address(address)
    return _Seen(generator, address) if (*words, place) == random.getstate()[1] else None


_python_seen = _python_words()


def _python_state() -> Any:
    if _python_seen is None or random._inst.gauss_next is not None:  # type: ignore[attr-defined]
        return random.getstate()
    return _python_seen.state(_read_python)


def _read_python() -> tuple[Any, bool]:
    return random.getstate(), False


_numpy_seen: _Seen | None = None
_numpy_generator: Callable[[], Any] = lambda: None  # noqa: E731 - numpy's, once it was imported


def _numpy_state() -> Any:
    if _numpy_seen is None or _numpy_seen.generator is not _numpy_generator():
        _look_at_numpy()
    return _read_numpy()[0] if _numpy_seen is None else _numpy_seen.state(_read_numpy)


def _look_at_numpy() -> None:
    global _numpy_seen, _numpy_generator  # noqa: PLW0603
    import numpy as np

    _numpy_seen = None
    if hasattr(np.random, "get_bit_generator"):  # numpy 1.24
        _numpy_generator = np.random.get_bit_generator
        generator = _numpy_generator()
        if type(generator) is np.random.MT19937:
            end = generator.ctypes.state_address + 4 * (_WORDS + 1)
            _numpy_seen = _Seen(generator, end - _LOOK_BYTES)


def _read_numpy() -> tuple[Any, bool]:
    import numpy as np

    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return _plain(state), True
    # In the order that transformers writes.
    inner, waits = state["state"], int(state["has_gauss"])
    return ("MT19937", inner["key"].tobytes(), int(inner["pos"]), waits, float(state["gauss"])), bool(waits)


def _restore_numpy(state: Any) -> None:
    import numpy as np

    if _numpy_seen is not None:
        _numpy_seen.forget()
    if isinstance(state, Mapping):
        np.random.set_state(_arrays(state))
    else:
        name, words, *rest = state
        np.random.set_state((name, np.asarray(words, dtype=np.uint32), *rest))


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(state: bytes | torch.Tensor | torch.Generator) -> torch.Tensor:
    if isinstance(state, bytes):
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)
    return state.get_state() if isinstance(state, torch.Generator) else state


def _plain(value: Any) -> Any:
    """numpy's own types as Python's; arrays of words as lists."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _arrays(value: Any) -> Any:
    import numpy as np

    if isinstance(value, Mapping):
        return {key: _arrays(inner) for key, inner in value.items()}
    return np.asarray(value, dtype=np.uint64) if isinstance(value, list) else value
