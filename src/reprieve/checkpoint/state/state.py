"""What belongs to a run: named objects, and the random number generators.

    modules               → <name>.safetensors     (what safetensors cannot hold → <name>.extra.pt)
    torch.Generator       → rng_state.pth          beside the global generators
    state_dict/load_…     → <name>.pt              optimizers, schedulers, scalers, data loaders, anything with the pair
    dict, list, tensor    → <name>.pt              plain values, restored in place

Among several ranks, modules and optimizers are one thing of which each rank has all or a shard; schedulers and scalers
are the same everywhere; everything else (data loaders, random numbers, plain values) is each rank's own.

`captured()` is a view, not a copy: it must be written or staged before training goes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from reprieve.checkpoint.format.file_names import RNG
from reprieve.checkpoint.format.safetensors_layout import can_hold
from reprieve.checkpoint.format.shards import is_sharded
from reprieve.errors import ConfigError, StateError
from reprieve.rng import capture_rng

VALUES = "values"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]*")


class Sharing(Enum):
    """Whose a part of the state is, among several ranks."""

    ALL = "each rank has all of it, or a shard"
    FIRST = "the same everywhere: rank 0's is saved"
    OWN = "each rank's own"


@dataclass(slots=True)
class Captured:
    """The state at one moment, as references to live tensors."""

    modules: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    ties: dict[str, dict[str, str]] = field(default_factory=dict)
    """Per module: names of a parameter that has another name before."""
    buffers: dict[str, set[str]] = field(default_factory=dict)
    """Per module: those of its tensors that are buffers. They are not the same on all ranks."""
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per module: entries that safetensors cannot hold."""
    trees: dict[str, Any] = field(default_factory=dict)
    configs: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class State:
    """The named objects of a run."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.modules: dict[str, torch.nn.Module] = {}
        self.own_buffers: set[str] = set()
        """Modules whose buffers each rank keeps for itself; DDP makes those of the others rank 0's at every step."""
        self.stateful: dict[str, Any] = {}
        self.plain: dict[str, dict[Any, Any] | list[Any] | torch.Tensor] = {}
        self.generators: dict[str, torch.Generator] = {}
        for name, obj in objects.items():
            if not _NAME.fullmatch(name) or name in (RNG, VALUES):
                raise ConfigError(f"{name!r} cannot be the name of a part of the state: it names a file")
            _refuse_deepspeed(name, obj)
            if isinstance(obj, torch.nn.Module):
                self.modules[name] = unwrap(obj)
                if not _broadcasts_buffers(obj):
                    self.own_buffers.add(name)
            elif isinstance(obj, torch.Generator):
                self.generators[name] = obj
            elif callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
                self.stateful[name] = obj
            elif isinstance(obj, dict | list | torch.Tensor):
                self.plain[name] = obj
            else:
                raise ConfigError(
                    f"{name} is a {type(obj).__name__}, which cannot be restored in place: give an object with "
                    "state_dict and load_state_dict, a dict, a list or a tensor, or pass it to save(values=…)"
                )

    @property
    def names(self) -> list[str]:
        return sorted([*self.modules, *self.stateful, *self.plain])

    def sharing(self, name: str) -> Sharing:
        """Whose the tree of this name is."""
        obj = self.stateful.get(name)
        if hasattr(obj, "param_groups"):
            return Sharing.ALL
        if isinstance(obj, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler):
            return Sharing.FIRST
        return Sharing.OWN

    def captured(self, values: Mapping[str, Any] | None = None, *, rng: bool = True) -> Captured:
        out = Captured()
        for name, module in self.modules.items():
            full = module.state_dict()
            out.modules[name] = {key: value for key, value in full.items() if can_hold(value)}
            out.extras[name] = {key: value for key, value in full.items() if not can_hold(value)}
            _refuse_sharded(name, out.extras[name])
            out.ties[name] = _ties(module)
            out.buffers[name] = {key for key, _ in module.named_buffers(remove_duplicate=False)} & full.keys()
            config = getattr(module, "config", None)
            if callable(getattr(config, "to_json_string", None)):
                out.configs[name] = _config_of(module)
        for name, obj in self.stateful.items():
            out.trees[name] = obj.state_dict()
        out.trees.update(self.plain)
        if values:
            out.trees[VALUES] = dict(values)
        if rng or self.generators:
            out.trees[RNG] = capture_rng(self.generators, everything=rng)
        return out


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself: wrappers (compile, DDP) would put a prefix before every key of a stock checkpoint."""
    while True:
        if isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            module = inner
        elif isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            module = module.module
        else:
            return module


def _broadcasts_buffers(module: torch.nn.Module) -> bool:
    while isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
        module = inner
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) and bool(module.broadcast_buffers)


def _ties(module: torch.nn.Module) -> dict[str, str]:
    """The second and further names of each parameter, and its first."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), key)) != key:
            ties[key] = known
    return ties


def _refuse_deepspeed(name: str, obj: object) -> None:
    """Its engine divides a state among ranks in a way of its own: what each would give us are no replicas."""
    by_name = any("deepspeed" in kind.__module__ for kind in type(obj).__mro__)
    if by_name or (isinstance(obj, torch.nn.Module) and any(hasattr(one, "ds_id") for one in obj.parameters())):
        raise ConfigError(
            f"{name} is DeepSpeed's, which saves and loads its state itself. With a transformers.Trainer Reprieve sees "
            "to that (reprieve.transformers.protect, reprieve run); in a loop of your own use FSDP2 (fully_shard)"
        )


def _refuse_sharded(name: str, extras: Mapping[str, Any]) -> None:
    for key, value in extras.items():
        if is_sharded(value):
            raise StateError(f"{name}.{key} is spread over ranks and of a type that safetensors lacks ({value.dtype})")


def _config_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """config.json, with which transformers' `from_pretrained` knows what to build."""
    import json

    config: dict[str, Any] = json.loads(module.config.to_json_string())  # type: ignore[union-attr,operator]
    return {**config, "architectures": [type(module).__name__]}
