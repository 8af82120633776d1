"""The random numbers that the order of batches depends on: the global generators and those that a loader holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reprieve.checkpoint.rng import capture_rng, restore_rng

_HOLDERS = ("sampler", "batch_sampler", "dataset")
_GENERATORS = ("generator", "synchronized_generator")
"""`synchronized_generator` is accelerate's."""


class Randomness:
    """All generators of one loader, each once. Looked up anew each time: some samplers make theirs when first used."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def capture(self) -> dict[str, Any]:
        """The global ones too."""
        return capture_rng(self._generators())

    def restore(self, state: Mapping[str, Any]) -> None:
        state = dict(state)
        if len(state.get("cuda", ())) != (torch.cuda.device_count() if "cuda" in state else 0):
            del state["cuda"]  # of other devices: nothing in a loader's order hangs on them
        restore_rng(state, self._shared(state))

    def capture_own(self) -> dict[str, Any]:
        """Only the loader's."""
        state = capture_rng(self._generators(), everything=False)
        if seeds := {name: holder.initial_seed for name, holder in self._seeded()}:
            state["seeds"] = seeds
        return state

    def restore_own(self, state: Mapping[str, Any]) -> None:
        restore_rng(state, self._shared(state), everything=False)
        for name, holder in self._seeded():
            holder.initial_seed = state.get("seeds", {}).get(name, holder.initial_seed)

    def _seeded(self) -> Iterator[tuple[str, Any]]:
        """Accelerate's sampler takes its seed from torch when it is made: another one in each start of a program that
        sets none."""
        for name, holder in _holders(self._loader, "loader", set()):
            if isinstance(getattr(holder, "initial_seed", None), int):
                yield name, holder

    def _shared(self, state: Mapping[str, Any]) -> dict[str, torch.Generator]:
        saved = state.get("generators", {})
        return {name: generator for name, generator in self._generators().items() if name in saved}

    def _generators(self) -> dict[str, torch.Generator]:
        found: dict[int, tuple[str, torch.Generator]] = {}
        for name, holder in _holders(self._loader, "loader", set()):
            for attribute in _GENERATORS:
                generator = getattr(holder, attribute, None)
                if isinstance(generator, torch.Generator):
                    found.setdefault(id(generator), (f"{name}.{attribute}", generator))
        return dict(found.values())


def _holders(holder: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The loader, its samplers, and samplers inside these: accelerate puts a batch sampler around another one."""
    seen.add(id(holder))
    yield name, holder
    for attribute in _HOLDERS:
        inner = getattr(holder, attribute, None)
        if inner is not None and id(inner) not in seen:
            yield from _holders(inner, f"{name}.{attribute}", seen)
