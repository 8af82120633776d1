"""A trainer that can be stopped: each call of its `train` is a `ProtectedTraining`. Only this instance is changed."""

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
    """Of one trainer, for as many calls of `train` as there are."""

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._options = dict(options)
        self._calls = 0
        self._pushing = HubPusher(trainer)
        self.training: ProtectedTraining | None = None
        """The call that is running."""
        trainer.add_callback(_Events(self))

    def train(
        self, real: Callable[..., Any], resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """In place of `Trainer.train`, which is `real`."""
        trainer = self._trainer
        if self.training is not None:
            return real(resume_from_checkpoint, trial, *args, **kwargs)
        if trial is not None:
            log.warning("a trial of a hyperparameter search is not protected: it runs as it always does")
            return real(resume_from_checkpoint, trial, *args, **kwargs)
        with reporting_startup_errors():
            preflight.check(trainer)
            settings, rest = preflight.settings(trainer, self._options, self._calls + 1)
        preflight.remove_rivals(trainer)
        self._calls += 1
        self.training = ProtectedTraining(trainer, self._pushing, settings, rest)
        try:
            return self.training.run(real, resume_from_checkpoint, trial, *args, **kwargs)
        finally:
            self.training = None


def protection_of(trainer: Any, options: Mapping[str, Any]) -> Protection:
    """The trainer's own; made at the first call, with these options."""
    known: Protection | None = vars(trainer).get(_PROTECTION)
    if known is None:
        known = Protection(trainer, options)
        setattr(trainer, _PROTECTION, known)
    return known


class _Events(TrainerCallback):
    """What only callbacks are told."""

    def __init__(self, protection: Protection) -> None:
        self._protection = protection

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._protection.training is not None:
            self._protection.training.begun()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._protection.training is not None:
            self._protection.training.epoch_ended()

    def on_log(self, *args: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if self._protection.training is not None and logs:
            self._protection.training.logged(logs)
