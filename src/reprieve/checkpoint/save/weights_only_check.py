"""Finds state that could be saved but not loaded again: at start-up and before each save, not at the resume.

Pickling shows which classes and functions loading will look up. Once a pickle with just these has been loaded the way
`weights_only` does, others need not be: torch's unpickler takes 50 µs a tensor, and a save can be short of time.
"""

from __future__ import annotations

import functools
from collections import OrderedDict

import torch

from reprieve.checkpoint.format.layout import Pickled
from reprieve.checkpoint.format.torch_layout import KINDS, pickle_without_data
from reprieve.checkpoint.format.torch_unpickle import meta_storage, unpickle
from reprieve.checkpoint.save.plan import Plan
from reprieve.errors import InvalidCheckpoint, UnsafeState


def check_loadable(plan: Plan) -> None:
    """Raise UnsafeState for the first file that `torch.load(weights_only=True)` would refuse."""
    for file in plan.files:
        if file.pickled is None or file.pickled.used <= _proven():
            continue
        try:
            _load(file.name, file.pickled)
        except (UnsafeState, InvalidCheckpoint) as error:
            raise UnsafeState(
                f"{file.name} could be saved but not loaded again: {error}\nUse only tensors, numbers, strings and "
                "containers in that state, or allow its types with torch.serialization.add_safe_globals"
            ) from error


@functools.cache
def _proven() -> frozenset[object]:
    """The globals of tensors, parameters and ordered dicts, once a sample of them has been loaded."""
    tensors = [torch.zeros(1, dtype=dtype) for dtype in KINDS if not str(dtype).startswith("torch.q")]
    pickled = pickle_without_data("a sample", [OrderedDict(tensors=tensors), torch.nn.Parameter(torch.zeros(1))])
    _load("a sample", pickled)
    return frozenset(pickled.used)


def _load(name: str, pickled: Pickled) -> None:
    unpickle(name, pickled.data, meta_storage)
