"""What the status of a TrainJob says, sampled every second beside what rank 0 has really done."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster.kit.training import Training
from tests.cluster.rig.kubectl import KubectlError

PERIOD_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One reading. Times are monotonic."""

    began: float
    """Before the status was read: it was at least so new."""
    steps_before: int
    """Those that rank 0 had done then."""
    steps_after: int
    """And after the answer."""
    has_checkpoint: bool
    """The newest checkpoint that the status names is there, or it names none."""
    progress: dict[str, Any]

    @property
    def state(self) -> str:
        return str(self.progress.get("state", ""))

    @property
    def step(self) -> int:
        return int(self.progress.get("step", 0))

    @property
    def checkpoint_step(self) -> int:
        """Of the newest checkpoint."""
        return int(str(self.progress.get("checkpointing", {}).get("latestCheckpoint", "0")).rpartition("-")[2])


class ProgressSamples:
    """Samples while the block runs."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.all: list[Sample] = []
        self._excused: list[tuple[float, float]] = []

    def __enter__(self) -> ProgressSamples:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def states(self) -> list[str]:
        """In their order, without repetitions."""
        found: list[str] = []
        for each in self.all:
            if each.state and each.state != (found[-1] if found else ""):
                found.append(each.state)
        return found

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """While the block runs, the status may be as old as it likes: nobody leads, for example."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._excused.append((began, time.monotonic()))

    def assert_close_to_the_truth(self, within_s: float, *, epoch_steps: int) -> None:
        """No status was ahead of rank 0, none fell back, and none of a running job was older than `within_s`. The
        other values are those of its step, and its newest checkpoint is there."""
        losses, checked = dict(self._training.lab.seen(0)), 0
        for number, sample in enumerate(self.all):
            assert sample.step <= sample.steps_after, f"ahead of rank 0: {sample}"
            if number:
                before = self.all[number - 1]
                assert sample.step >= before.step, f"fell back: {before}, {sample}"
                assert sample.checkpoint_step >= before.checkpoint_step, f"fell back: {before}, {sample}"
            if sample.step:
                self._assert_consistent(sample, losses, epoch_steps)
            earlier = [each for each in self.all[:number] if each.began < sample.began - within_s]
            recent = self.all[len(earlier) : number]
            is_excused = any(began < sample.began and sample.began - within_s < end for began, end in self._excused)
            runs = all(each.state == "Running" for each in (*earlier[-1:], *recent, sample))
            if earlier and runs and not is_excused:
                checked += 1
                assert sample.step >= earlier[-1].steps_before, f"older than {within_s:g} s: {earlier[-1]}, {sample}"
        assert checked > 0, "it never ran for long enough"

    def _assert_consistent(self, sample: Sample, losses: dict[int, float], epoch_steps: int) -> None:
        """A termination message has the percentage rounded down, and the loss in another precision. A report may be
        between a step and its loss."""
        found, step, steps = sample.progress, sample.step, self._training.options["steps"]
        near = [losses[each] for each in range(step - 1, step + 2) if each in losses]
        loss = float(found["loss"])
        assert any(abs(loss - each) < 1e-4 for each in near), f"not the loss of its step: {sample}, {near}"
        percent = float(found["percentComplete"])
        assert abs(percent - 100 * step / steps) <= 1, f"not the percentage of its step: {sample}"
        assert found["epoch"] in {(step - 1) // epoch_steps, step // epoch_steps}, (
            f"not the epoch of its step: {sample}"
        )
        assert sample.checkpoint_step <= sample.steps_after, f"a checkpoint ahead of rank 0: {sample}"
        assert sample.has_checkpoint, f"its newest checkpoint does not exist: {sample}"

    def _run(self) -> None:
        training = self._training
        while not self._stop.wait(PERIOD_S):
            began, before = time.monotonic(), training.lab.last_step(0)
            with contextlib.suppress(KubectlError):  # the API server is away
                found = training.namespace.get("trainjob", training.name)
                progress = found.get("status", {}).get("trainingProgress", {})
                checkpoint = progress.get("checkpointing", {}).get("latestCheckpoint")
                self.all.append(
                    Sample(
                        began=began,
                        steps_before=before,
                        steps_after=training.lab.last_step(0),
                        has_checkpoint=checkpoint is None or Path(checkpoint).is_dir(),
                        progress=progress,
                    )
                )
