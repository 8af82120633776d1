"""The random number generators that the order of batches depends on: the global ones and those that a loader holds.

A pass captures them when it starts (`capture`), so that a resumed pass draws the same order. What the loader holds is
also part of every saved loader position (`capture_own`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reprieve.data.dataset_proxies import is_stateful
from reprieve.rng import capture_rng, restore_rng

_HOLDERS = ("sampler", "batch_sampler", "dataset")
_GENERATORS = ("generator", "synchronized_generator")
"""`synchronized_generator` is accelerate's."""


class LoaderRng:
    """All generators of one loader, each once. Looked up each time: some samplers make a generator when first used."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def capture(self) -> dict[str, Any]:
        """Capture all that the order of a pass depends on, including the global generators."""
        return {**capture_rng({}), **self.capture_own()}

    def restore(self, state: Mapping[str, Any]) -> None:
        restore_global(state)
        self.restore_own(state)

    def capture_own(self) -> dict[str, Any]:
        """Capture only what the loader holds."""
        state = capture_rng(self._generators(), everything=False)
        for part, found in (
            ("seeds", {name: holder.initial_seed for name, holder in self._seeded()}),
            ("samplers", {name: holder.state_dict() for name, holder in self._stateful()}),
        ):
            if found:
                state[part] = found
        return state

    def restore_own(self, state: Mapping[str, Any]) -> None:
        self.restore_generators(state)
        for name, holder in self._seeded():
            holder.initial_seed = state.get("seeds", {}).get(name, holder.initial_seed)
        for name, holder in self._stateful():
            if name in state.get("samplers", {}):
                holder.load_state_dict(state["samplers"][name])

    def restore_generators(self, state: Mapping[str, Any]) -> None:
        """Restore only the generators. Samplers that are being iterated stay as they are."""
        saved = state.get("generators", {})
        found = {name: generator for name, generator in self._generators().items() if name in saved}
        restore_rng(state, found, everything=False)

    def _generators(self) -> dict[str, torch.Generator]:
        found: dict[int, tuple[str, torch.Generator]] = {}
        for name, holder in _holders(self._loader, "loader", set()):
            for attribute in _GENERATORS:
                generator = getattr(holder, attribute, None)
                if isinstance(generator, torch.Generator):
                    found.setdefault(id(generator), (f"{name}.{attribute}", generator))
        return dict(found.values())

    def _seeded(self) -> Iterator[tuple[str, Any]]:
        """Yield accelerate's samplers. Each takes its seed from torch when it is made, so the seed differs between
        starts of a program that sets none."""
        for name, holder in self._samplers():
            if isinstance(getattr(holder, "initial_seed", None), int):
                yield name, holder

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        """Yield samplers that remember more than a generator, such as an epoch."""
        return ((name, holder) for name, holder in self._samplers() if is_stateful(holder))

    def _samplers(self) -> Iterator[tuple[str, Any]]:
        return (found for found in _holders(self._loader, "loader", set()) if found[0].endswith("sampler"))


def restore_global(state: Mapping[str, Any]) -> None:
    """Restore the global generators from what `capture` or `capture_rng` returned."""
    if "cuda" in state and len(state["cuda"]) != torch.cuda.device_count():
        # States of other devices are left out: the order of a loader does not depend on them.
        state = {part: value for part, value in state.items() if part != "cuda"}
    restore_rng(state, {})


def _holders(holder: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the loader, its samplers, and samplers inside these: accelerate puts a batch sampler around another one."""
    seen.add(id(holder))
    yield name, holder
    for attribute in _HOLDERS:
        inner = getattr(holder, attribute, None)
        if inner is not None and id(inner) not in seen:
            yield from _holders(inner, f"{name}.{attribute}", seen)
