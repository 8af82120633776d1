"""Prepares the restore of one `torch.nn.Module`: where its saved tensors are, and which memory they are read into.

Tensors go straight into the module's memory if its state dict shows that memory and nothing hooks into loading.
Otherwise they are read into fresh memory and given to `load_state_dict`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from reprieve.checkpoint.format.file_names import extras_file
from reprieve.checkpoint.format.shards import from_local, is_sharded, local_part
from reprieve.checkpoint.restore.comparison import Comparison
from reprieve.checkpoint.restore.safetensors_header import TensorLocation, read_header
from reprieve.checkpoint.restore.source import CheckpointSource
from reprieve.errors import InvalidCheckpoint, StateError, StateMismatch

ApplyStep = Callable[[], object]
"""A change to live objects, made after every byte has been read and verified."""


@dataclass(slots=True)
class _SavedModule:
    """What a checkpoint holds of one module."""

    tensors: dict[str, TensorLocation] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """Keys of tied weights that are saved under another key."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Entries of the state dict that were saved in a torch file."""

    def location(self, key: str) -> TensorLocation | None:
        return None if key in self.objects else self.tensors.get(self.ties.get(key, key))

    def tie_by_memory(self, live: Mapping[str, Any]) -> None:
        """Find tied weights that the writer left out without recording it, as transformers does: in the live module
        they share memory with a saved one."""
        saved_keys = {_memory_of(value): key for key, value in live.items() if key in self.tensors}
        for key in set(live) - self.keys(live):
            memory = _memory_of(live[key])
            if memory is not None and memory in saved_keys:
                self.ties[key] = saved_keys[memory]

    def keys(self, live: Mapping[str, Any]) -> set[str]:
        """Every key that can be restored; tied ones only where the live module has them, too."""
        return set(self.tensors) | {key for key in self.ties if key in live} | set(self.objects)


class ModuleLoader:
    """The restore of one module from one checkpoint."""

    def __init__(self, source: CheckpointSource, comparison: Comparison, name: str, module: torch.nn.Module) -> None:
        self._source = source
        self._comparison = comparison
        self._name = name
        self._module = module
        self._live: dict[str, Any] = module.state_dict()

    def prepare(self, own_buffers_file: str | None = None) -> list[ApplyStep]:
        """Request every tensor from the reader; what is left to apply once it has run.

        `own_buffers_file`: the file with the buffers that this rank keeps for itself.
        """
        saved = self._find()
        if saved is None:
            self._comparison.report_missing(self._name, f"{self._name}.safetensors")
            return []
        saved.tie_by_memory(self._live)
        self._comparison.check_keys(self._name, saved.keys(self._live), set(self._live))
        loaded = {key: value for key, value in saved.objects.items() if key in self._live}
        for key, value in loaded.items():
            if isinstance(value, torch.Tensor):
                self._comparison.check_tensor(f"{self._name}.{key}", value, self._live[key])
        steps: list[ApplyStep] = []
        direct = _loads_directly(self._module, self._live)
        if direct:
            steps += self._read_into_module(saved)
        else:
            loaded |= self._read_copies(saved)
        if loaded or not direct:
            # Of a module that is read directly, only a part of the keys is loaded here.
            strict = self._comparison.strict and not direct
            steps.append(lambda: _load_module(self._module, loaded, strict=strict))
        if own_buffers_file is not None:
            steps += self._load_own_buffers(own_buffers_file)
        return steps

    # What the checkpoint holds

    def _find(self) -> _SavedModule | None:
        """What was saved of the module, in our files or in those of stock code; None if nothing was."""
        name, has = self._name, self._source.has
        if has(f"{name}.safetensors.index.json"):
            saved = self._read_headers(self._shards())
        elif has(f"{name}.safetensors"):
            saved = self._read_headers([f"{name}.safetensors"])
        else:
            stock = ("pytorch_model.bin",) if name == "model" else ()
            candidates = (*stock, f"{name}.pt", f"{name}.pth", f"{name}.bin")
            torch_file = next((file for file in candidates if has(file)), None)
            return None if torch_file is None else _SavedModule(objects=dict(self._source.load_tree(torch_file, {})))
        if has(extras_file(name)):
            saved.objects = self._source.load_tree(extras_file(name), {})
        return saved

    def _shards(self) -> list[str]:
        """The files that the index of a module in several files names."""
        index, folder = f"{self._name}.safetensors.index.json", self._source.folder
        file = self._source.open(index)
        try:
            shards = sorted(set(json.loads(file.read(0, file.size))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidCheckpoint(f"{index} is not readable: {error!r}", path=folder) from error
        if any(not isinstance(shard, str) or "/" in shard or shard.startswith(".") for shard in shards):
            raise InvalidCheckpoint(f"{index} names a file outside of the checkpoint", path=folder)
        return shards

    def _read_headers(self, shards: list[str]) -> _SavedModule:
        saved, ties = _SavedModule(), {}
        for shard in shards:
            if not self._source.has(shard):
                raise InvalidCheckpoint(f"{shard} is missing", path=self._source.folder)
            locations, metadata = read_header(self._source.open(shard))
            saved.tensors.update(locations)
            ties.update(metadata)
        saved.ties = {key: other for key, other in ties.items() if other in saved.tensors and key not in saved.tensors}
        return saved

    # Where it is read to

    def _saved_tensors(self, saved: _SavedModule) -> Iterator[tuple[str, torch.Tensor, TensorLocation]]:
        """The live tensors that have a saved counterpart of the same dtype and shape, and where that is."""
        for key, live in self._live.items():
            location = saved.location(key)
            if location is not None:
                self._comparison.check_tensor(f"{self._name}.{key}", location, live)
                yield key, live, location

    def _read_into_module(self, saved: _SavedModule) -> list[ApplyStep]:
        """Read into the module's own memory, or beside it where the bytes lie there in another order."""
        steps: list[ApplyStep] = []
        targets: dict[int, torch.Tensor] = {}
        for key, live, location in self._saved_tensors(saved):
            name, local = f"{self._name}.{key}", _local_tensor(live)
            if torch._debug_has_internal_overlap(local) == 1:
                raise StateError(
                    f"{name} cannot be restored: several of its elements share memory. Clone it before training"
                )
            target = targets.get(id(location))
            if target is None:
                target = targets[id(location)] = local if _is_simple(local) else _empty_like(local)
                self._source.read_tensor(location.file, location.start, name, live, target)
            if target.data_ptr() != local.data_ptr() or not _is_simple(local):
                steps.append(partial(local.copy_, target))
        return steps

    def _read_copies(self, saved: _SavedModule) -> dict[str, torch.Tensor]:
        """Read into fresh memory, for `load_state_dict`; tied weights share a copy."""
        copies: dict[str, torch.Tensor] = {}
        targets: dict[int, torch.Tensor] = {}
        for key, live, location in self._saved_tensors(saved):
            target = targets.get(id(location))
            if target is None:
                target = targets[id(location)] = _empty_like(_local_tensor(live))
                self._source.read_tensor(location.file, location.start, f"{self._name}.{key}", live, target)
            copies[key] = from_local(target, live) if is_sharded(live) else target
        return copies

    def _load_own_buffers(self, file: str) -> list[ApplyStep]:
        steps: list[ApplyStep] = []
        for key, value in self._source.load_tree(file, {}).items():
            if key in self._live:
                self._comparison.check_tensor(f"{self._name}.{key}", value, self._live[key])
                steps.append(partial(self._live[key].detach().copy_, value))
        return steps


def _loads_directly(module: torch.nn.Module, live: Mapping[str, Any]) -> bool:
    """Whether bytes may be read into the module's memory: its state dict shows that memory, and nothing hooks in."""
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
        return False
    hooks = [
        getattr(hook, "hook", hook)
        for part in module.modules()
        for hook in (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values())
    ]
    # FSDP's own hook makes the state dict show the shards, which it does by now.
    if any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.") for hook in hooks):
        return False
    for part in module.modules():
        loader = type(part)._load_from_state_dict
        if loader is not torch.nn.Module._load_from_state_dict and not loader.__module__.startswith("torch."):
            return False
    own = {_memory_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return all(_memory_of(value) in own for value in live.values() if isinstance(value, torch.Tensor))


def _load_module(module: torch.nn.Module, loaded: Mapping[str, Any], *, strict: bool) -> None:
    try:
        module.load_state_dict(loaded, strict=strict)
    except RuntimeError as error:
        raise StateMismatch(str(error)) from error


def _memory_of(value: object) -> tuple[object, ...] | None:
    """A key that is the same for two names of one tensor; None for what has no plain memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if is_sharded(value):
        local = local_part(value)
        return (local.device, local.data_ptr(), value.dtype, value.shape) if local.nbytes else None
    lazy = value.is_conj(), value.is_neg()
    return (value.device, value.data_ptr() if value.nbytes else 0, value.dtype, value.shape, value.stride(), lazy)


def _local_tensor(value: torch.Tensor) -> torch.Tensor:
    return local_part(value) if is_sharded(value) else value.detach()


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes lie in memory in the order in which they are saved."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
