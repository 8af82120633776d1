"""DeepSpeed: its engine saves and loads model and optimizer itself, and with ZeRO each rank has a part of them.

What it saves is caught like the rest (`collecting.py`). What it loads is held against the model first, and unpickled
with weights_only: left alone it runs whatever a file says, and takes an adapter of other modules for this one's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from reprieve.adapters.transformers.patching import replaced
from reprieve.adapters.transformers.resume.strict_loading import explained, of_another_model
from reprieve.checkpoint.folder.foreign import deepspeed as files
from reprieve.errors import ConfigError, StateMismatch
from reprieve.units import format_size


def check(trainer: Any) -> None:
    """Raise for what its engine would write past us."""
    config: Mapping[str, Any] = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    zero = config.get("zero_optimization", {})
    if any((zero.get(name) or {}).get("device") == "nvme" for name in ("offload_optimizer", "offload_param")):
        raise ConfigError(
            "DeepSpeed keeps a part of the training's state in files of its own (offload to nvme), which Reprieve "
            'cannot make safe: offload to "cpu", or run without Reprieve'
        )
    if config.get("checkpoint", {}).get("writer") or config.get("datastates_ckpt"):
        raise ConfigError(
            "DeepSpeed's configuration names a checkpoint writer of its own, and Reprieve is one: take "
            '"checkpoint.writer" and "datastates_ckpt" out of it'
        )


def gathering(trainer: Any) -> str | None:
    """What its checkpoints cost, if the shards of the weights are put together for them."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    zero = plugin.deepspeed_config.get("zero_optimization", {})
    if plugin.zero_stage != 3 or not zero.get("stage3_gather_16bit_weights_on_model_save"):
        return None
    weights = sum(getattr(one, "ds_numel", one.numel()) * one.element_size() for one in trainer.model.parameters())
    return (
        f"stage3_gather_16bit_weights_on_model_save gathers the whole model ({format_size(weights)}) in the memory of "
        "rank 0 for every checkpoint, and rank 0 alone writes it. To resume it is not needed"
    )


@contextlib.contextmanager
def read_safely(trainer: Any) -> Iterator[None]:
    """While inside, what DeepSpeed reads of a checkpoint is checked."""
    if not trainer.is_deepspeed_enabled:
        yield
        return
    module: Any = importlib.import_module("transformers.trainer")  # where it is called from
    load = functools.partial(_load, module.deepspeed_load_checkpoint)
    types = [pkgutil.resolve_name(name) for name in files.GLOBALS]
    with torch.serialization.safe_globals(types), replaced(module, "deepspeed_load_checkpoint", load):
        yield


def size(engine: Any, rank: int) -> int:
    """About how many bytes this rank writes."""
    optimizer = engine.optimizer
    parts = [one for group in optimizer.param_groups for one in group["params"]]
    states = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    if engine.zero_optimization():
        own = sum(one.nbytes for one in (*parts, *states))
    else:
        own = sum(one.nbytes for one in states) if rank == 0 else 0
    if rank == 0 and not engine.zero_optimization_partition_weights():
        own += 2 * sum(one.nbytes for one in engine.module.parameters())  # for DeepSpeed, and for everybody else
    return int(own)


def parts(engine: Any) -> dict[str, Any]:
    """What this rank holds of the model and of the optimizer, for a drill."""
    optimizer = engine.optimizer
    groups = optimizer.param_groups
    held = [one for group in groups for one in group["params"]]
    return {
        "model": {
            # ds_tensor: this rank's part, where the model is divided among ranks.
            **{name: getattr(value, "ds_tensor", value) for name, value in engine.module.named_parameters()},
            **dict(engine.module.named_buffers()),
        },
        "optimizer": {
            "groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
            "parameters": held,
            "states": [optimizer.state.get(one) for one in held],
        },
    }


def _load(real: Callable[..., None], engine: Any, path: str, *args: Any, **kwargs: Any) -> None:
    """In place of transformers' `deepspeed_load_checkpoint`."""
    _check_partition(engine, Path(path))
    read = functools.partial(_read, torch.load, engine, Path(path))
    with explained(path), replaced(torch, "load", read):
        try:
            real(engine, path, *args, **kwargs)
        except FileNotFoundError as error:
            raise StateMismatch(
                f"{path} was saved with other settings of DeepSpeed (is the precision another one?): {error}"
            ) from error


def _read(real: Callable[..., Any], engine: Any, folder: Path, file: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `torch.load`."""
    if not isinstance(file, str) or not Path(file).is_relative_to(folder):
        return real(file, *args, **kwargs)
    state = real(file, *args, **{**kwargs, "weights_only": True})
    if isinstance(state, Mapping) and "module" in state:
        _check_module(engine.module, state, str(folder))
    return state


def _check_partition(engine: Any, folder: Path) -> None:
    """ZeRO goes on only where the optimizer lies on as many ranks as before, divided in the same way."""
    saved = files.partition(path.relative_to(folder).as_posix() for path in folder.glob("*/*.pt"))
    if saved is None:
        return  # not DeepSpeed's: transformers says so
    now = files.KINDS[engine.zero_optimization_stage()]
    if saved.kind != now:
        raise StateMismatch(
            f"{folder} was saved with {saved.kind}, and this is {now}: go on with that, or start over from its weights "
            "(zero_to_fp32.py in there writes them)"
        )
    ranks = getattr(engine, "seq_dp_world_size", engine.dp_world_size)
    if saved.optimizers and saved.optimizers != ranks:
        raise StateMismatch(
            f"{folder} holds the optimizer in {saved.optimizers} parts, for as many ranks, and these are {ranks}: "
            f"DeepSpeed cannot divide it anew. Go on with {saved.optimizers} ranks, or start over from its weights "
            "(zero_to_fp32.py in there writes them)"
        )


def _check_module(model: Any, state: Mapping[str, Any], path: str) -> None:
    """DeepSpeed itself does not ask whether an adapter fits, nor a model of which each rank has a part."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    shapes = {name: tuple(shape) for group in state.get("param_shapes") or () for name, shape in group.items()}
    missing = trained.keys() - (shapes or state["module"]).keys()
    unexpected = shapes.keys() - trained.keys() if shapes else state["module"].keys() - model.state_dict().keys()
    if missing or unexpected:
        raise of_another_model(path, missing, unexpected)
    for name, shape in shapes.items():
        live = trained[name]
        if shape != tuple(getattr(live, "ds_shape", live.shape)):  # ds_shape: of the whole, where this is a part
            raise RuntimeError(f"size mismatch for {name}: {shape} in the checkpoint")
