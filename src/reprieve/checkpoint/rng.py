"""The random number generators of one process, as tensors, integers and tuples that `weights_only` loads.

The file has the keys that transformers uses (`python`, `numpy`, `cpu`, `cuda`), plus the generators that the user gave.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from reprieve.errors import StateMismatch


def capture_rng(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """A copy of every generator's state; nothing is drawn from them."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        name, keys, *rest = np.random.get_state(legacy=True)
        state["numpy"] = (name, [int(key) for key in keys], *(_plain(value) for value in rest))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if generators:
        state["generators"] = {name: generator.get_state() for name, generator in generators.items()}
    return state


def restore_rng(state: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    saved = set(state.get("generators", {}))
    if saved != set(generators):
        raise StateMismatch(f"the checkpoint has the generators {sorted(saved)}, this run has {sorted(generators)}")
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    torch.set_rng_state(state["cpu"])
    if "numpy" in state:
        import numpy as np

        name, words, *rest = state["numpy"]
        np.random.set_state((name, np.asarray(words, dtype=np.uint32), *rest))
    if "cuda" in state:
        cuda = state["cuda"]
        states = [cuda] if isinstance(cuda, torch.Tensor) else cuda
        if len(states) != torch.cuda.device_count():
            raise StateMismatch(
                f"the checkpoint has the RNG of {len(states)} GPUs, this process sees {torch.cuda.device_count()}"
            )
        torch.cuda.set_rng_state_all(states)
    for name, generator in generators.items():
        generator.set_state(state["generators"][name])


def _plain(value: Any) -> int | float:
    return float(value) if isinstance(value, float) else int(value)
