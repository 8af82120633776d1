"""The training state of a run: named objects, and the random number generators.

    modules               → <name>.safetensors     (what safetensors cannot hold → <name>.extra.pt)
    torch.Generator       → rng_state.pth          beside the global generators
    state_dict/load_…     → <name>.pt              optimizers, schedulers, scalers, data loaders, anything with the pair
    dict, list, tensor    → <name>.pt              plain values, restored in place

In a job of several ranks, each rank holds all or a shard of modules and optimizers. Schedulers and scalers are the same
on every rank. Everything else (data loaders, random numbers, plain values) belongs to each rank alone.

`State.captured` returns references, not copies: they must be written or staged before training continues.
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
    """How several ranks hold a part of the state."""

    ALL = "each rank holds all of it, or a shard"
    FIRST = "the same on every rank: rank 0's is saved"
    OWN = "each rank has its own"


@dataclass(slots=True)
class Captured:
    """A training state as references to live tensors."""

    modules: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    ties: dict[str, dict[str, str]] = field(default_factory=dict)
    """Per module: further names of a parameter, each with the first one."""
    buffers: dict[str, set[str]] = field(default_factory=dict)
    """Per module: the names of its buffers, which can differ between ranks."""
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per module: entries of its state_dict that safetensors cannot hold."""
    trees: dict[str, Any] = field(default_factory=dict)
    configs: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class State:
    """The named objects of a run, grouped by how they are saved."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.modules: dict[str, torch.nn.Module] = {}
        self.own_buffers: set[str] = set()
        """Modules whose buffers each rank keeps for itself. In the others, DDP broadcasts rank 0's at every step."""
        self.stateful: dict[str, Any] = {}
        self.plain: dict[str, dict[Any, Any] | list[Any] | torch.Tensor] = {}
        self.generators: dict[str, torch.Generator] = {}
        for name, obj in objects.items():
            if not _NAME.fullmatch(name) or name in (RNG, VALUES):
                raise ConfigError(
                    f"{name!r} cannot name a part of the state, because its file is named after it: use letters, digits"
                    f" and underscores, and neither {RNG!r} nor {VALUES!r}"
                )
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
                    f"{name} is a {type(obj).__name__}, which cannot be restored in place: use an object with "
                    "state_dict and load_state_dict, a dict, a list or a tensor, or pass it to save(values=…)"
                )

    @property
    def names(self) -> list[str]:
        return sorted([*self.modules, *self.stateful, *self.plain])

    def sharing(self, name: str) -> Sharing:
        """Return how several ranks hold the object of this name."""
        obj = self.stateful.get(name)
        if hasattr(obj, "param_groups"):
            return Sharing.ALL
        if isinstance(obj, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler):
            return Sharing.FIRST
        return Sharing.OWN

    def captured(self, values: Mapping[str, Any] | None = None, *, rng: bool = True) -> Captured:
        """Return the state as it is now, with `values` in addition; with `rng`, the global generators too."""
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
    """Return the module inside wrappers (compile, DDP), which would add a prefix to every key of a checkpoint."""
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
    """Map the second and further names of each parameter to its first."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        if (first_name := first.setdefault(id(parameter), key)) != key:
            ties[key] = first_name
    return ties


def _refuse_deepspeed(name: str, obj: object) -> None:
    """Raise ConfigError for objects of DeepSpeed: its engine shards the state in its own way."""
    by_name = any("deepspeed" in kind.__module__ for kind in type(obj).__mro__)
    if by_name or (
        isinstance(obj, torch.nn.Module) and any(hasattr(parameter, "ds_id") for parameter in obj.parameters())
    ):
        raise ConfigError(
            f"{name} is DeepSpeed's, which saves and loads its state itself. Reprieve supports it in a "
            "transformers.Trainer (reprieve.transformers.protect, reprieve run). In your own loop, use FSDP2 "
            "(fully_shard)"
        )


def _refuse_sharded(name: str, extras: Mapping[str, Any]) -> None:
    for key, value in extras.items():
        if is_sharded(value):
            raise StateError(f"{name}.{key} is sharded and has a dtype that safetensors lacks ({value.dtype})")


def _config_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return config.json, which tells transformers' `from_pretrained` what to build."""
    import json

    config: dict[str, Any] = json.loads(module.config.to_json_string())  # type: ignore[union-attr,operator]
    return {**config, "architectures": [type(module).__name__]}
