"""Makes the trainer's own loading strict: a checkpoint that does not fit is an error, not a warning.

Transformers resumes with `load_state_dict(strict=False)` and ignores what PEFT reports about an adapter. Models whose
weights have other names on disk than in memory (the experts of Mixtral and Qwen2-MoE) silently lose them that way.
Here `from_pretrained`, which knows the names, reads these. The hooks in `hooks.py` wrap each load in these functions.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState

from reprieve.adapters.transformers.patching import patched
from reprieve.errors import ReprieveError, StateMismatch

log = logging.getLogger("reprieve")

_ADAPTER = "adapter_config.json"

_MISMATCHES = ("state_dict", "loaded state dict", "size mismatch", "Can't find a valid checkpoint", "failed to resume")
"""Words in which torch, PEFT, transformers and DeepSpeed report a checkpoint of another model."""


# Transformers 5.17 loads the optimizer of several ranks without GPUs to "cpu:0", a location that torch rejects.
torch.serialization.register_package(
    100, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


@contextlib.contextmanager
def mismatch_explained(path: str) -> Iterator[None]:
    """Turn errors about shapes or names of weights into StateMismatch."""
    try:
        yield
    except ReprieveError:
        raise
    except (RuntimeError, ValueError) as error:
        if not any(words in str(error) for words in _MISMATCHES):
            raise  # out of memory, for example
        raise StateMismatch(
            f"{path} does not fit this model: {_in_one_line(error)}. Train the model that it was saved from, choose "
            "another output_dir, or start over (reprieve run --fresh)"
        ) from error


def _in_one_line(error: Exception) -> str:
    """Return the first reason: torch lists each weight in a line of its own."""
    head, *reasons = [line.strip(" \t.") for line in str(error).splitlines() if line.strip()]
    if not reasons:
        return head
    return f"{head} {reasons[0]}" + (f" and {len(reasons) - 1} more" if len(reasons) > 1 else "")


def complete_weights(model: Any, result: Any, path: str) -> None:
    """Load the weights that a non-strict load left out, or raise StateMismatch.

    `result` is what `load_state_dict(strict=False)` returned.
    """
    missing, unexpected = _missing(model, result.missing_keys), list(result.unexpected_keys)
    if not missing and not unexpected:
        tie = getattr(model, "tie_weights", None)
        if result.missing_keys and tie is not None:
            tie()
        return
    if isinstance(model, PreTrainedModel) and missing and unexpected:
        # It initializes what it does not find, and reports that.
        from_pretrained: Any = type(model).from_pretrained
        converted, info = from_pretrained(
            path, config=model.config, dtype=next(model.parameters()).dtype, output_loading_info=True
        )
        missing, unexpected = _missing(model, info["missing_keys"]), list(info["unexpected_keys"])
        if not missing and not unexpected:
            log.info("converted the names of the weights in %s", path)
            model.load_state_dict(converted.state_dict())
    if missing or unexpected:
        raise model_mismatch(path, missing, unexpected)


@contextlib.contextmanager
def strict_adapters(model: Any, path: str) -> Iterator[None]:
    """Make a PEFT adapter that lacks trained weights, or has unknown ones, an error."""
    original = getattr(model, "load_adapter", None)
    if original is None:
        yield
        return
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def load_adapter(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # Some methods (VeRA) regenerate a part of their weights, always the same: those are not trained.
        missing = [key for key in getattr(result, "missing_keys", ()) if key in trained]
        unexpected = list(getattr(result, "unexpected_keys", ()))
        if missing or unexpected:
            raise model_mismatch(path, missing, unexpected)
        return result

    with patched(model, "load_adapter", load_adapter):
        yield


@contextlib.contextmanager
def all_adapters_loaded(model: Any, path: str) -> Iterator[None]:
    """Correct what the stock load does with several adapters.

    It skips the adapter in the checkpoint's own folder and activates a single one. This loads all of them, and those
    that were active and trained before stay so.
    """
    if not hasattr(model, "peft_config"):
        yield
        return
    active = list(model.active_adapters)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    yield
    folder = Path(path)
    if (folder / _ADAPTER).exists() and any(
        (inner / _ADAPTER).exists() for inner in folder.iterdir() if inner.is_dir()
    ):
        model.load_adapter(path, "default")  # PEFT saves this one into the folder itself
    if list(model.active_adapters) != active:
        model.base_model.set_adapter(active)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))


def restore_callbacks(trainer: Any) -> None:
    """Restore the existing callbacks from the trainer's state. Stock would make new ones, in another order."""
    by_name: dict[str, list[Any]] = {}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            by_name.setdefault(type(callback).__name__, []).append(callback)
    for name, data in trainer.state.stateful_callbacks.items():
        states = data if isinstance(data, list) else [data]
        for callback, saved in zip(by_name.get(name, ()), states, strict=False):
            restore_callback(callback, saved)


def restore_callback(callback: Any, saved: Mapping[str, Any]) -> None:
    """Restore a callback to what its `state()` returned. Some keep their state in constructor arguments."""
    if json.dumps(saved.get("args", {}), default=str) != json.dumps(callback.state().get("args", {}), default=str):
        vars(callback).update(vars(type(callback)(**saved["args"])))
    for attribute, value in saved.get("attributes", {}).items():
        setattr(callback, attribute, value)


def model_mismatch(path: str, missing: Collection[str], unexpected: Collection[str]) -> StateMismatch:
    """Return the error to raise for weights that do not belong to this model."""
    return StateMismatch(
        f"{path} was saved from another model: "
        + "; ".join(
            f"{len(keys)} weights {what}, such as {', '.join(sorted(keys)[:3])}"
            for what, keys in (("are missing", missing), ("are unknown", unexpected))
            if keys
        )
    )


def _missing(model: Any, keys: Collection[str]) -> list[str]:
    """Return the keys that are really missing. Others are tied to weights that were loaded, or are never saved."""
    never_saved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = model.state_dict(keep_vars=True)
    pointers = {value.data_ptr() for key, value in state.items() if key not in keys and value.numel()}
    return [key for key in keys if key not in never_saved and state[key].data_ptr() not in pointers]
