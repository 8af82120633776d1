"""What of a trainer is in no file that Hugging Face saves, and still decides how training goes on.

    random numbers   stock saves them too, but restores them at another point than where they were taken
    flags            what its control says is due: to log, to evaluate, to save, to end the epoch or the training
    losses           the sum since the last log line, and since the beginning
    TRL              its averages since the last log line, GRPO's place in a batch of generations
    mode             whether the model trains or was evaluated last: TRL logs the averages of one or the other
    log              the order of the keys in its entries
    generation       what evaluations have changed in the model's generation_config

A dict of plain values and tensors: it is saved, by every rank, and loaded with weights_only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from reprieve.adapters.transformers.resume import strict_loading
from reprieve.data.loader_rng import restore_global
from reprieve.rng import capture_rng

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_LOSSES = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")  # not every version has them all
_OF_TRL = ("_metrics", "_total_train_tokens", "_step", "_buffered_inputs")


def capture(trainer: Any) -> dict[str, Any]:
    """Now."""
    return {
        "rng": capture_rng({}),
        "training": trainer.model.training,
        "flags": {name: bool(getattr(trainer.control, name)) for name in _FLAGS},
        "tr_loss": float(trainer._tr_loss),
        "losses": {name: vars(trainer)[name] for name in _LOSSES if name in vars(trainer)},
        "trl": {name: _plain(vars(trainer)[name]) for name in _OF_TRL if name in vars(trainer)},
        "evaluation_loaders": evaluation_loaders(trainer),
    }


def evaluation_loaders(trainer: Any) -> list[str]:
    """Which of them have workers already, that stay for the next evaluation: those draw no random number any more."""
    return sorted(getattr(trainer, "_eval_dataloaders", ()))


def restore(trainer: Any, moment: Mapping[str, Any]) -> None:
    """As it was then."""
    restore_global(moment["rng"])
    if trainer.model.training != moment["training"]:
        trainer.model.train(moment["training"])
    for name, flag in moment["flags"].items():
        setattr(trainer.control, name, flag)
    trainer._tr_loss.fill_(moment["tr_loss"])
    for name, value in moment["losses"].items():
        setattr(trainer, name, value)
    for name, value in moment["trl"].items():
        if name in vars(trainer):
            setattr(trainer, name, _filled(vars(trainer)[name], value, trainer.args.device))


def log_keys(log: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The orders in which log entries have their keys: trainer_state.json sorts them, and a model card takes the
    headings of its table from the keys of an entry."""
    return [list(keys) for keys in {frozenset(entry): tuple(entry) for entry in log}.values()]


def order_log(log: list[dict[str, Any]], orders: Sequence[Sequence[str]]) -> None:
    """Bring the keys of each entry back into their order."""
    by_keys = {frozenset(order): order for order in orders}
    for number, entry in enumerate(log):
        log[number] = {key: entry[key] for key in by_keys.get(frozenset(entry), entry)}


def generation(trainer: Any) -> dict[str, Any]:
    """How its model generates, as far as that is plain values."""
    config = getattr(trainer.model, "generation_config", None)
    found = {} if config is None else vars(config)
    return {name: value for name, value in found.items() if value is None or isinstance(value, int | float | str)}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What an evaluation has changed: Seq2SeqTrainer fills in the defaults, and save_model() writes them."""
    return {name: [before.get(name), value] for name, value in now.items() if before.get(name) != value}


def change_generation(trainer: Any, changed: Mapping[str, Sequence[Any]]) -> None:
    """Apply the changes again, except to what the script sets to another value now."""
    config = getattr(trainer.model, "generation_config", None)
    for name, (before, value) in changed.items():
        if config is not None and getattr(config, name, None) == before:
            setattr(config, name, value)


class EvaluationSnapshot:
    """A trainer before an evaluation, in memory: a stop in it goes back to there."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.moment = capture(trainer)
        self._logged = len(trainer.state.log_history)
        self._callbacks = [
            (one, copy.deepcopy(one.state()))
            for one in trainer.callback_handler.callbacks
            if isinstance(one, ExportableState)
        ]

    def go_back(self) -> None:
        trainer = self._trainer
        del trainer.state.log_history[self._logged :]
        for callback, state in self._callbacks:
            strict_loading.restore_callback(callback, state)
        for key in set(evaluation_loaders(trainer)) - set(self.moment["evaluation_loaders"]):
            del trainer._eval_dataloaders[key]
        self._weights_for_training()
        restore(trainer, self.moment)

    def _weights_for_training(self) -> None:
        """Optimizers without a schedule hold other weights in an evaluation. There and back is not exact: one whose
        state says which these are is left with them, and finds them when it evaluates again."""
        optimizer = self._trainer.optimizer
        if callable(getattr(optimizer, "train", None)) and not all(
            "train_mode" in one for one in optimizer.param_groups
        ):
            optimizer.train()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _filled(live: Any, value: Any, device: torch.device) -> Any:
    """The value in the containers that are there: TRL's make an empty list for a name that they do not know."""
    if isinstance(live, dict) and isinstance(value, Mapping):
        known = {key: _filled(live.get(key), one, device) for key, one in value.items()}
        live.clear()
        live.update(known)
        return live
    if isinstance(value, Mapping):
        return {key: _filled(None, one, device) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(None, one, device) for one in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
