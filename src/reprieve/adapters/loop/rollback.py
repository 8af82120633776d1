"""Back to the last completed step, for a stop that cannot wait for the end of this one.

What a half-done step has changed is the random numbers and the buffers (BatchNorm's statistics); parameters and
optimizer change only at its end. Copies are made after a step only where steps are long against the grace
period: they take some 75 µs, and where steps are short nobody needs them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from reprieve.rng import capture_rng, restore_rng

_LONG = 0.25
"""The part of the grace period from which on a step is long."""


class Rollback:
    """The last completed step, as far as the next one overwrites it."""

    def __init__(self, modules: Mapping[str, nn.Module], grace: timedelta | None) -> None:
        self._modules = modules
        self.long_s = grace.total_seconds() * _LONG if grace is not None else math.inf
        """From how many seconds on a step is long."""
        self._copy: tuple[dict[str, Any], list[tuple[Tensor, Tensor]]] | None = None

    def step_ended(self) -> None:
        """A step has ended, and the next is likely to be long."""
        buffers = [(buffer, buffer.clone()) for module in self._modules.values() for buffer in module.buffers()]
        self._copy = capture_rng({}), buffers

    def forget(self) -> None:
        """There is no way back until the next step has ended."""
        self._copy = None

    @property
    def possible(self) -> bool:
        return self._copy is not None

    def roll_back(self) -> None:
        assert self._copy is not None
        rng, buffers = self._copy
        with torch.no_grad():
            for buffer, was in buffers:
                buffer.copy_(was)
        restore_rng(rng, {})
