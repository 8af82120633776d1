"""Rolls the state back to the last completed step, for a stop that cannot wait for the end of the running one.

A step that is not complete has changed the random numbers and the buffers (BatchNorm's statistics); parameters and
optimizer change only at its end. Copies are made after a step only if steps are long compared with the grace period:
a copy takes some 75 µs, and short steps can be finished.
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
"""A step is long if it takes more than this share of the grace period."""


class Rollback:
    """A copy of what the next step overwrites of the last completed one."""

    def __init__(self, modules: Mapping[str, nn.Module], grace: timedelta | None) -> None:
        self._modules = modules
        self.long_s = grace.total_seconds() * _LONG if grace is not None else math.inf
        """A step that takes this many seconds is long."""
        self._copy: tuple[dict[str, Any], list[tuple[Tensor, Tensor]]] | None = None

    def step_ended(self) -> None:
        """Copy the state after a step, because the next one is likely to be long."""
        buffers = [(buffer, buffer.clone()) for module in self._modules.values() for buffer in module.buffers()]
        self._copy = capture_rng({}), buffers

    def forget(self) -> None:
        """Drop the copy: no rollback is possible until the next step has ended."""
        self._copy = None

    @property
    def possible(self) -> bool:
        return self._copy is not None

    def roll_back(self) -> None:
        assert self._copy is not None
        rng, buffers = self._copy
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
        restore_rng(rng, {})
