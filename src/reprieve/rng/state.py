"""Captures and restores the random number generators of one process.

A captured state consists of tensors, integers and tuples, which `weights_only` loads. It has the keys that transformers
uses (`python`, `numpy`, `cpu`, `cuda`), and `generators` for those that the user named. Nothing here draws a number.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from reprieve.errors import StateMismatch
from reprieve.rng import fast_path


class RngSnapshot(NamedTuple):
    """The states of the global generators in a form that is quick to take, to compare and to pickle."""

    python: Any
    cpu: bytes | torch.Generator
    numpy: Any
    """None if numpy is not imported."""
    cuda: tuple[bytes | torch.Tensor, ...] | None
    """None if CUDA is not initialized."""

    def plain(self) -> dict[str, Any]:
        """Convert to the form that `capture_rng` returns, `restore_rng` takes and files contain."""
        state: dict[str, Any] = {"python": self.python, "cpu": _tensor(self.cpu)}
        if self.numpy is not None:
            state["numpy"] = self.numpy
            if isinstance(self.numpy, tuple):
                name, key, *rest = self.numpy
                state["numpy"] = (name, list(memoryview(key).cast("I")), *rest)
        if self.cuda is not None:
            state["cuda"] = [_tensor(device_state) for device_state in self.cuda]
        return state


def snapshot_rng(*, as_bytes: bool = True) -> RngSnapshot:
    """Return the states of the global generators.

    `as_bytes`: in a form that can be compared and pickled. Without it, a snapshot takes half as long.
    """
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
    """Copy the states of the global generators and of `generators`; without `everything`, only of the latter."""
    state: dict[str, Any] = {}
    if everything:
        state = snapshot_rng().plain()
    if generators:
        state["generators"] = {name: generator.get_state() for name, generator in generators.items()}
    return state


def check_rng(state: Mapping[str, Any], generators: Mapping[str, torch.Generator], *, everything: bool = True) -> None:
    """Raise StateMismatch if `state` cannot be restored into this process."""
    saved = set(state.get("generators", {}))
    if saved != set(generators):
        raise StateMismatch(f"the checkpoint has the generators {sorted(saved)}, this run has {sorted(generators)}")
    if everything and "cuda" in state:
        count = len(_cuda_states(state))
        if count != torch.cuda.device_count():
            raise StateMismatch(
                f"the checkpoint has the RNG states of {count} GPUs, this process sees {torch.cuda.device_count()}. "
                "Run with as many GPUs, or with rng=False"
            )


def restore_rng(
    state: Mapping[str, Any], generators: Mapping[str, torch.Generator], *, everything: bool = True
) -> None:
    """Put captured states back; without `everything`, only those of `generators`."""
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


def _python_state() -> Any:
    return fast_path.python_state() if fast_path.ENABLED else random.getstate()


def _numpy_state() -> Any:
    return fast_path.numpy_state(_read_numpy) if fast_path.ENABLED else _read_numpy()


def _read_numpy() -> Any:
    import numpy as np

    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return _plain(state)
    # In the order that transformers writes.
    inner = state["state"]
    return "MT19937", inner["key"].tobytes(), int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])


def _restore_numpy(state: Any) -> None:
    import numpy as np

    fast_path.invalidate_numpy()
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
    """Convert numpy's types to Python's, and arrays of words to lists."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _arrays(value: Any) -> Any:
    import numpy as np

    if isinstance(value, Mapping):
        return {key: _arrays(inner) for key, inner in value.items()}
    return np.asarray(value, dtype=np.uint64) if isinstance(value, list) else value
