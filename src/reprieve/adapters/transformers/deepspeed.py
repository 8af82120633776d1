"""Makes DeepSpeed's checkpoints safe to load and checks its configuration.

DeepSpeed's engine saves and loads model and optimizer itself, and with ZeRO each rank has a part of them.
`save/interception.py` intercepts what it saves. What it loads is compared with the model first and unpickled with
weights_only: stock DeepSpeed runs any code in a file, and accepts an adapter of other modules.
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

from reprieve.adapters.transformers.patching import patched
from reprieve.adapters.transformers.resume.strict_loading import mismatch_explained, model_mismatch
from reprieve.checkpoint.folder.foreign import deepspeed as files
from reprieve.errors import ConfigError, StateMismatch
from reprieve.units import format_size


def check(trainer: Any) -> None:
    """Raise ConfigError for settings with which the engine writes state that Reprieve does not see."""
    config: Mapping[str, Any] = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    zero = config.get("zero_optimization", {})
    if any((zero.get(name) or {}).get("device") == "nvme" for name in ("offload_optimizer", "offload_param")):
        raise ConfigError(
            "DeepSpeed keeps a part of the training state in its own files (offload to nvme), which Reprieve cannot "
            'checkpoint: offload to "cpu", or run without Reprieve'
        )
    if config.get("checkpoint", {}).get("writer") or config.get("datastates_ckpt"):
        raise ConfigError(
            "DeepSpeed's configuration names a checkpoint writer, and Reprieve replaces it: remove "
            '"checkpoint.writer" and "datastates_ckpt"'
        )


def gathering_warning(trainer: Any) -> str | None:
    """Return a warning if the engine gathers the whole model for every checkpoint."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    zero = plugin.deepspeed_config.get("zero_optimization", {})
    if plugin.zero_stage != 3 or not zero.get("stage3_gather_16bit_weights_on_model_save"):
        return None
    weights = sum(getattr(each, "ds_numel", each.numel()) * each.element_size() for each in trainer.model.parameters())
    return (
        f"stage3_gather_16bit_weights_on_model_save gathers the whole model ({format_size(weights)}) in the memory of "
        "rank 0 for every checkpoint, and rank 0 alone writes it. Resuming does not need it: turn it off"
    )


@contextlib.contextmanager
def safe_loading(trainer: Any) -> Iterator[None]:
    """Check what DeepSpeed reads from a checkpoint."""
    if not trainer.is_deepspeed_enabled:
        yield
        return
    module: Any = importlib.import_module("transformers.trainer")  # the module that calls it
    load = functools.partial(_load, module.deepspeed_load_checkpoint)
    types = [pkgutil.resolve_name(name) for name in files.GLOBALS]
    with torch.serialization.safe_globals(types), patched(module, "deepspeed_load_checkpoint", load):
        yield


def checkpoint_bytes(engine: Any, rank: int) -> int:
    """Estimate how many bytes this rank writes."""
    optimizer = engine.optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = (value for state in optimizer.state.values() for value in state.values())
    states = [value for value in values if isinstance(value, torch.Tensor)]
    if engine.zero_optimization():
        size = sum(tensor.nbytes for tensor in (*parameters, *states))
    else:
        size = sum(tensor.nbytes for tensor in states) if rank == 0 else 0
    if rank == 0 and not engine.zero_optimization_partition_weights():
        # The weights are saved twice: in DeepSpeed's format and in Hugging Face's.
        size += 2 * sum(parameter.nbytes for parameter in engine.module.parameters())
    return int(size)


def drill_parts(engine: Any) -> dict[str, Any]:
    """Return this rank's part of model and optimizer, for a drill to compare."""
    optimizer = engine.optimizer
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {
        "model": {
            # ds_tensor: this rank's part, where the model is partitioned.
            **{name: getattr(value, "ds_tensor", value) for name, value in engine.module.named_parameters()},
            **dict(engine.module.named_buffers()),
        },
        "optimizer": {
            "groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
            "parameters": parameters,
            "states": [optimizer.state.get(parameter) for parameter in parameters],
        },
    }


def _load(original: Callable[..., None], engine: Any, path: str, *args: Any, **kwargs: Any) -> None:
    """Replaces transformers' `deepspeed_load_checkpoint`."""
    _check_partition(engine, Path(path))
    read = functools.partial(_read, torch.load, engine, Path(path))
    with mismatch_explained(path), patched(torch, "load", read):
        try:
            original(engine, path, *args, **kwargs)
        except FileNotFoundError as error:
            raise StateMismatch(
                f"{path} was saved with other DeepSpeed settings (another precision?): {error}"
            ) from error


def _read(original: Callable[..., Any], engine: Any, folder: Path, file: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `torch.load`."""
    if not isinstance(file, str) or not Path(file).is_relative_to(folder):
        return original(file, *args, **kwargs)
    state = original(file, *args, **{**kwargs, "weights_only": True})
    if isinstance(state, Mapping) and "module" in state:
        _check_module(engine.module, state, str(folder))
    return state


def _check_partition(engine: Any, folder: Path) -> None:
    """Raise StateMismatch unless the optimizer is partitioned as before: ZeRO cannot redistribute it."""
    saved = files.partition(path.relative_to(folder).as_posix() for path in folder.glob("*/*.pt"))
    if saved is None:
        return  # not DeepSpeed's: transformers reports it
    now = files.KINDS[engine.zero_optimization_stage()]
    if saved.kind != now:
        raise StateMismatch(
            f"{folder} was saved with {saved.kind}, and this run has {now}: resume with {saved.kind}, or start over "
            "from its weights (zero_to_fp32.py in that folder extracts them)"
        )
    ranks = getattr(engine, "seq_dp_world_size", engine.dp_world_size)
    if saved.optimizers and saved.optimizers != ranks:
        raise StateMismatch(
            f"{folder} holds the optimizer in {saved.optimizers} parts, for as many ranks, and this run has {ranks} "
            f"ranks: DeepSpeed cannot redistribute it. Resume with {saved.optimizers} ranks, or start over from its "
            "weights (zero_to_fp32.py in that folder extracts them)"
        )


def _check_module(model: Any, state: Mapping[str, Any], path: str) -> None:
    """Raise unless the weights fit. DeepSpeed checks neither adapters nor partitioned models."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    shapes = {name: tuple(shape) for group in state.get("param_shapes") or () for name, shape in group.items()}
    missing = trained.keys() - (shapes or state["module"]).keys()
    unexpected = shapes.keys() - trained.keys() if shapes else state["module"].keys() - model.state_dict().keys()
    if missing or unexpected:
        raise model_mismatch(path, missing, unexpected)
    for name, shape in shapes.items():
        live = trained[name]
        if shape != tuple(getattr(live, "ds_shape", live.shape)):  # ds_shape: the whole tensor's, where this is a part
            raise RuntimeError(f"size mismatch for {name}: {shape} in the checkpoint")
