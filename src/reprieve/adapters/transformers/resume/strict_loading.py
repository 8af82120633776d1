"""Reading a checkpoint with the trainer's own code, but strictly: what does not fit is an error, not a warning.

Transformers resumes with `load_state_dict(strict=False)`, and does not look at what PEFT says of an adapter. Models
whose weights have other names on disk than in memory (Mixtral's and Qwen2-MoE's experts) lose them that way without a
word; these are read through `from_pretrained`, which knows the names.
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

from reprieve.adapters.transformers.patching import replaced
from reprieve.errors import ReprieveError, StateMismatch

log = logging.getLogger("reprieve")

_ADAPTER = "adapter_config.json"

_MISFITS = ("state_dict", "loaded state dict", "size mismatch", "Can't find a valid checkpoint", "failed to resume")
"""How torch, PEFT, transformers and DeepSpeed say it."""


# Transformers 5.17 loads the optimizer of several ranks without GPUs to "cpu:0", which torch does not know.
torch.serialization.register_package(
    100, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Weights of other shapes or names: said as such."""
    try:
        yield
    except ReprieveError:
        raise
    except (RuntimeError, ValueError) as error:
        if not any(words in str(error) for words in _MISFITS):
            raise  # out of memory, and whatever else can go wrong
        raise StateMismatch(
            f"{path} does not fit this model: {error}. Train the model that it is of, or give another output_dir, or "
            "start over (reprieve run --fresh)"
        ) from error


def complete(model: Any, result: Any, path: str) -> None:
    """`result`: what `load_state_dict(strict=False)` answered. Read what it has left out, or raise StateMismatch."""
    missing, unexpected = _missing(model, result.missing_keys), list(result.unexpected_keys)
    if not missing and not unexpected:
        tie = getattr(model, "tie_weights", None)
        if result.missing_keys and tie is not None:
            tie()
        return
    if isinstance(model, PreTrainedModel) and missing and unexpected:
        # What it does not find it makes up, and says so.
        read: Any = type(model).from_pretrained
        converted, info = read(
            path, config=model.config, dtype=next(model.parameters()).dtype, output_loading_info=True
        )
        missing, unexpected = _missing(model, info["missing_keys"]), list(info["unexpected_keys"])
        if not missing and not unexpected:
            log.info("the weights in %s have other names: they were converted", path)
            model.load_state_dict(converted.state_dict())
    if missing or unexpected:
        raise of_another_model(path, missing, unexpected)


@contextlib.contextmanager
def strict_adapters(model: Any, path: str) -> Iterator[None]:
    """While inside, an adapter that does not fill what is trained, or has something left over, is an error."""
    real = getattr(model, "load_adapter", None)
    if real is None:
        yield
        return
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def load_adapter(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        # Some methods (VeRA) make a part of their weights anew, the same each time: those are not trained.
        missing = [key for key in getattr(result, "missing_keys", ()) if key in trained]
        unexpected = list(getattr(result, "unexpected_keys", ()))
        if missing or unexpected:
            raise of_another_model(path, missing, unexpected)
        return result

    with replaced(model, "load_adapter", load_adapter):
        yield


@contextlib.contextmanager
def every_adapter(model: Any, path: str) -> Iterator[None]:
    """Around stock's load. Of a checkpoint with several adapters that leaves out the one in the folder itself, and it
    activates one alone: here all are loaded, and those are active and trained that were before."""
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
        model.load_adapter(path, "default")  # that is whose files PEFT puts there
    if list(model.active_adapters) != active:
        model.base_model.set_adapter(active)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))


def callbacks(trainer: Any) -> None:
    """The state of callbacks, into those that are there; the trainer would make new ones, in another order."""
    known: dict[str, list[Any]] = {}
    for one in trainer.callback_handler.callbacks:
        if isinstance(one, ExportableState):
            known.setdefault(type(one).__name__, []).append(one)
    for name, data in trainer.state.stateful_callbacks.items():
        for one, saved in zip(known.get(name, ()), data if isinstance(data, list) else [data], strict=False):
            restore_callback(one, saved)


def restore_callback(callback: Any, saved: Mapping[str, Any]) -> None:
    """As it was when its `state()` gave this. What it remembers may be among the arguments that it is made with."""
    if json.dumps(saved.get("args", {}), default=str) != json.dumps(callback.state().get("args", {}), default=str):
        vars(callback).update(vars(type(callback)(**saved["args"])))
    for attribute, value in saved.get("attributes", {}).items():
        setattr(callback, attribute, value)


def of_another_model(path: str, missing: Collection[str], unexpected: Collection[str]) -> StateMismatch:
    """What to raise."""
    return StateMismatch(
        f"{path} is of another model: "
        + "; ".join(
            f"{len(keys)} weights {what}, such as {', '.join(sorted(keys)[:3])}"
            for what, keys in (("are missing", missing), ("are unknown", unexpected))
            if keys
        )
    )


def _missing(model: Any, keys: Collection[str]) -> list[str]:
    """Those that are missed: others are tied to what is there, or are never saved."""
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = model.state_dict(keep_vars=True)
    pointers = {value.data_ptr() for key, value in state.items() if key not in keys and value.numel()}
    return [key for key in keys if key not in left_out and state[key].data_ptr() not in pointers]
