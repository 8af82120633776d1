"""Reports the progress of trainers that are not protected: the submitter of the job wants nothing else of Reprieve."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import TrainerCallback

from reprieve.progress.publisher import Publisher
from reprieve.progress.tracker import Tracker


class ReportsProgress(TrainerCallback):
    """Publishes where a training is, on rank 0."""

    def __init__(self) -> None:
        self._tracker = Tracker()
        self._publisher: Publisher | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._tracker = Tracker()
            self._tracker.plan(state.max_steps, state.num_train_epochs)
            self._publisher = Publisher.from_environment(self._tracker).start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tracker.step(int(state.global_step), state.epoch)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._tracker.metrics(logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._publisher is not None:
            self._tracker.finished()
            self._publisher.close()
            self._publisher = None


def report_all(module: Any) -> None:
    """Report the progress of every trainer of this process. `module`: `transformers.trainer`."""
    original = module.Trainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.add_callback(ReportsProgress())

    module.Trainer.__init__ = init
