"""Captures and restores what a trainer keeps in memory alone, and what its files do not preserve exactly.

`capture` and `restore` handle a `TrainerSnapshot`: it goes into every checkpoint, from every rank. An
`EvaluationSnapshot` stays in memory: a stop during an evaluation returns to the state before it. The log history and
the model's generation_config have functions of their own, because the trainer restores the rest of them itself.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from reprieve.adapters.transformers.resume import strict_loading
from reprieve.adapters.transformers.trainer_state import TrainerSnapshot
from reprieve.data.loader_rng import restore_global
from reprieve.rng import capture_rng

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_LOSS_ATTRIBUTES = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")  # some versions lack some
_TRL_ATTRIBUTES = ("_metrics", "_total_train_tokens", "_step", "_buffered_inputs")


def capture(trainer: Any) -> TrainerSnapshot:
    """Take a snapshot of the trainer as it is now."""
    return TrainerSnapshot(
        rng=capture_rng({}),
        model_is_training=trainer.model.training,
        control_flags={name: bool(getattr(trainer.control, name)) for name in _FLAGS},
        loss_since_log=float(trainer._tr_loss),
        loss_attributes={name: vars(trainer)[name] for name in _LOSS_ATTRIBUTES if name in vars(trainer)},
        trl_attributes={name: _to_plain(vars(trainer)[name]) for name in _TRL_ATTRIBUTES if name in vars(trainer)},
        evaluation_loaders=evaluation_loaders(trainer),
    )


def evaluation_loaders(trainer: Any) -> list[str]:
    """List the evaluation DataLoaders whose workers stay for the next evaluation: these draw no more random numbers."""
    return sorted(getattr(trainer, "_eval_dataloaders", ()))


def restore(trainer: Any, snapshot: TrainerSnapshot) -> None:
    """Put the trainer back into the state of the snapshot."""
    restore_global(snapshot.rng)
    if trainer.model.training != snapshot.model_is_training:
        trainer.model.train(snapshot.model_is_training)
    for name, flag in snapshot.control_flags.items():
        setattr(trainer.control, name, flag)
    trainer._tr_loss.fill_(snapshot.loss_since_log)
    for name, value in snapshot.loss_attributes.items():
        setattr(trainer, name, value)
    for name, value in snapshot.trl_attributes.items():
        if name in vars(trainer):
            setattr(trainer, name, _fill(vars(trainer)[name], value, trainer.args.device))


def log_key_orders(log: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """List the orders in which log entries have their keys.

    trainer_state.json sorts the keys, and a model card takes the headings of its table from the keys of an entry.
    """
    return [list(keys) for keys in {frozenset(entry): tuple(entry) for entry in log}.values()]


def reorder_log(log: list[dict[str, Any]], orders: Sequence[Sequence[str]]) -> None:
    """Bring the keys of each entry back into their original order."""
    by_keys = {frozenset(order): order for order in orders}
    for number, entry in enumerate(log):
        log[number] = {key: entry[key] for key in by_keys.get(frozenset(entry), entry)}


def generation_settings(trainer: Any) -> dict[str, Any]:
    """Return the plain values of the model's generation_config."""
    config = getattr(trainer.model, "generation_config", None)
    values = {} if config is None else vars(config)
    return {name: value for name, value in values.items() if value is None or isinstance(value, int | float | str)}


def generation_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what evaluations changed: Seq2SeqTrainer fills in the defaults, and save_model() writes them."""
    return {name: [before.get(name), value] for name, value in now.items() if before.get(name) != value}


def apply_generation_changes(trainer: Any, changes: Mapping[str, Sequence[Any]]) -> None:
    """Apply the changes again, except to values that the script has changed since."""
    config = getattr(trainer.model, "generation_config", None)
    for name, (before, value) in changes.items():
        if config is not None and getattr(config, name, None) == before:
            setattr(config, name, value)


class EvaluationSnapshot:
    """The state of a trainer before an evaluation, kept in memory for a stop during it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._snapshot = capture(trainer)
        self._log_entries = len(trainer.state.log_history)
        self._callbacks = [
            (callback, copy.deepcopy(callback.state()))
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, ExportableState)
        ]

    def roll_back(self) -> None:
        """Undo what the evaluation did so far."""
        trainer = self._trainer
        del trainer.state.log_history[self._log_entries :]
        for callback, state in self._callbacks:
            strict_loading.restore_callback(callback, state)
        for key in set(evaluation_loaders(trainer)) - set(self._snapshot.evaluation_loaders):
            del trainer._eval_dataloaders[key]
        self._restore_training_weights()
        restore(trainer, self._snapshot)

    def _restore_training_weights(self) -> None:
        """Switch a schedule-free optimizer back to its training weights.

        The round trip is not exact. An optimizer whose state says which weights it holds (`train_mode`) keeps the
        evaluation weights: after the resume it finds them when it evaluates again.
        """
        optimizer = self._trainer.optimizer
        if callable(getattr(optimizer, "train", None)) and not all(
            "train_mode" in group for group in optimizer.param_groups
        ):
            optimizer.train()


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [_to_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _fill(live: Any, value: Any, device: torch.device) -> Any:
    """Put the value into the container that exists: TRL's defaultdicts make an empty list for an unknown name."""
    if isinstance(live, dict) and isinstance(value, Mapping):
        items = {key: _fill(live.get(key), item, device) for key, item in value.items()}
        live.clear()
        live.update(items)
        return live
    if isinstance(value, Mapping):
        return {key: _fill(None, item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(None, item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
