"""The random number generators of one process, as tensors, integers and tuples that `weights_only` loads.

The file has the keys that transformers uses (`python`, `numpy`, `cpu`, `cuda`), plus the generators that the user gave.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from reprieve.errors import StateMismatch


class RngSnapshot(NamedTuple):
    """The global generators, raw: quick to take, to compare and to pickle. `plain` is what goes into files."""

    python: Any
    cpu: bytes
    numpy: Any
    """None: nobody has imported it."""
    cuda: tuple[bytes, ...] | None
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


def snapshot_rng() -> RngSnapshot:
    cuda = torch.cuda.is_initialized()
    return RngSnapshot(
        random.getstate(),
        _bytes(torch.get_rng_state()),
        _numpy_state() if "numpy" in sys.modules else None,
        tuple(_bytes(one) for one in torch.cuda.get_rng_state_all()) if cuda else None,
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


_MT19937_BYTES = 625 * 4
"""The words and the place among them, in the memory of numpy's generator."""

_numpy_last: tuple[bytes, tuple[Any, ...]] = b"", ()


def _numpy_state() -> Any:
    global _numpy_last  # noqa: PLW0603
    import numpy as np

    # numpy takes 45 µs for a copy of its state, which mostly is that of the last time: 1 µs to see it. (The words
    # do not tell whether the second half of a pair of normal numbers waits.)
    words = b""
    if hasattr(np.random, "get_bit_generator"):  # numpy 1.24
        generator = np.random.get_bit_generator()
        if type(generator) is np.random.MT19937:
            words = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    seen, last = _numpy_last
    if words and words == seen and not last[3]:
        return last
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return _plain(state)
    # In the order that transformers writes.
    inner = state["state"]
    last = "MT19937", inner["key"].tobytes(), int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])
    _numpy_last = words, last
    return last


def _restore_numpy(state: Any) -> None:
    global _numpy_last  # noqa: PLW0603
    import numpy as np

    _numpy_last = b"", ()
    if isinstance(state, Mapping):
        np.random.set_state(_arrays(state))
    else:
        name, words, *rest = state
        np.random.set_state((name, np.asarray(words, dtype=np.uint32), *rest))


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


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
