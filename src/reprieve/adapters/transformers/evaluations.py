"""Makes the evaluations of a training stoppable: each prediction step is a boundary.

A stop during an evaluation takes effect at once: the trainer is rolled back to the state before the evaluation, and
the evaluation runs again after the resume. Evaluations that the script calls outside of the training loop are not
affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from reprieve.adapters.transformers.patching import call_arguments
from reprieve.adapters.transformers.resume.hooks import TrainerResume
from reprieve.adapters.transformers.resume.trainer_snapshot import EvaluationSnapshot
from reprieve.rng import capture_rng, restore_rng
from reprieve.run_state import RunState
from reprieve.session.session import Session


class ProtectedEvaluations:
    """The evaluations of one training."""

    def __init__(self, trainer: Any, session: Session, resume: TrainerResume, stop: Callable[[], None]) -> None:
        """`stop` saves and ends the process."""
        self._trainer = trainer
        self._session = session
        self._resume = resume
        self._stop = stop
        self.between_steps = False
        """The loop is between two steps, where it logs, evaluates and saves."""
        self._snapshot: EvaluationSnapshot | None = None
        """The trainer before the evaluation that is running."""
        self._loaders_to_start: set[str] = set()
        """Evaluation DataLoaders that had persistent workers in the interrupted process, and have none here yet."""

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """The replacements of the trainer's methods. Each gets the original as its first argument."""
        return {
            "_evaluate": self._evaluate_in_loop,
            "evaluate": self._evaluate,
            "prediction_step": self._prediction_step,
            "get_eval_dataloader": self._get_eval_dataloader,
        }

    def restart_workers_of(self, loaders: Iterable[str]) -> None:
        """Have these DataLoaders start their workers before their next use, as in the interrupted process."""
        self._loaders_to_start = set(loaders)

    def _evaluate_in_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._resume.is_pending:
            return {}  # eval_on_start: the first attempt has done it
        before, self.between_steps = self.between_steps, True
        try:
            return original(*args, **kwargs)
        finally:
            self.between_steps = before

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate one dataset. An evaluation of several datasets calls this for each of them, inside of this."""
        if not self.between_steps or self._snapshot is not None:
            return original(*args, **kwargs)
        self._snapshot = EvaluationSnapshot(self._trainer)
        try:
            self._pass_boundary(self._session.boundaries.step)
            with self._session.reporter.tracker.pausing(RunState.EVALUATING):
                metrics = original(*args, **kwargs)
        finally:
            self._snapshot = None
        if self._resume.evaluation_is_due:
            self._resume.evaluation_is_due = False
            self._session.last_saved = None  # the checkpoint of this step does not have the evaluation
        return metrics

    def _prediction_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._snapshot is not None:
            self._pass_boundary(self._session.boundaries.evaluation_step)
        return original(*args, **kwargs)

    def _pass_boundary(self, boundary: Callable[[], None]) -> None:
        session = self._session
        if session.stopped is not None:
            raise session.stopped
        boundary()
        if session.boundaries.stop_requested:
            assert self._snapshot is not None
            self._snapshot.roll_back()
            self._stop()

    def _get_eval_dataloader(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loader, dataset = original(*args, **kwargs), call_arguments(original, args, kwargs).get("eval_dataset")
        key = dataset if isinstance(dataset, str) else "eval"  # transformers' own keys
        if key in self._loaders_to_start:
            self._loaders_to_start.remove(key)
            rng = capture_rng({})
            # Workers start and draw a seed, which the interrupted process did earlier.
            iter(getattr(loader, "base_dataloader", loader))
            restore_rng(rng, {})
        return loader
