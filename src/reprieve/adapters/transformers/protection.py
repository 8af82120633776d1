"""Protects one trainer: each call of its `train` becomes a `ProtectedTraining`. Only this instance changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from transformers.trainer_callback import TrainerCallback

from reprieve.adapters.transformers import preflight
from reprieve.adapters.transformers.save.hub_push import HubPusher
from reprieve.adapters.transformers.training import ProtectedTraining
from reprieve.session.startup_errors import reporting_startup_errors

log = logging.getLogger("reprieve")

_PROTECTION = "_reprieve_protection"


class Protection:
    """The protection of one trainer, across all calls of its `train`."""

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._options = dict(options)
        self._calls = 0
        self._hub_pusher = HubPusher(trainer)
        self.training: ProtectedTraining | None = None
        """The training that is running."""
        trainer.add_callback(_Events(self))

    def train(
        self,
        original: Callable[..., Any],
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replaces `Trainer.train`, which is `original`."""
        trainer = self._trainer
        if self.training is not None:
            return original(resume_from_checkpoint, trial, *args, **kwargs)
        if trial is not None:
            log.warning("trials of a hyperparameter search are not protected: they run as without Reprieve")
            return original(resume_from_checkpoint, trial, *args, **kwargs)
        with reporting_startup_errors():
            preflight.check(trainer)
            settings, session_options = preflight.resolve_settings(trainer, self._options, self._calls + 1)
        preflight.remove_conflicting_callbacks(trainer)
        self._calls += 1
        self.training = ProtectedTraining(trainer, self._hub_pusher, settings, session_options)
        try:
            return self.training.run(original, resume_from_checkpoint, trial, *args, **kwargs)
        finally:
            self.training = None


def protection_of(trainer: Any, options: Mapping[str, Any]) -> Protection:
    """Return the trainer's protection. The first call makes it, with these options."""
    protection: Protection | None = vars(trainer).get(_PROTECTION)
    if protection is None:
        protection = Protection(trainer, options)
        setattr(trainer, _PROTECTION, protection)
    return protection


class _Events(TrainerCallback):
    """A callback that forwards the events that have no method of the trainer to hook into."""

    def __init__(self, protection: Protection) -> None:
        self._protection = protection

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._protection.training is not None:
            self._protection.training.on_train_begin()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._protection.training is not None:
            self._protection.training.on_epoch_end()

    def on_log(self, *args: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if self._protection.training is not None and logs:
            self._protection.training.on_log(logs)
