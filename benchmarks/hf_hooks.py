"""The cost of a step of a protected trainer: CPU time in the hooks, and in everything that reports progress."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

STEPS = 2000
_WARM = 200


def figures() -> dict[str, float]:
    """`hf.hooks_us`: microseconds of CPU time per step with all local sinks on, measured in a separate process."""
    command = [sys.executable, "-m", "benchmarks.hf_hooks"]
    found: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1]
    )
    return found


def show(found: dict[str, float]) -> None:
    print(
        f"a step of a protected transformers.Trainer, progress told: {found['hf.hooks_us']:.0f} µs of CPU time, "
        f"{found['hf.hooks.training_us']:.0f} of them in the training thread"
    )


def _measure() -> dict[str, float]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "TRAINING_PROGRESS_FILE": f"{folder}/progress.json",
            "PROGRESS_UPDATE_FREQUENCY": "1",
            "REPRIEVE_METRICS_PORT": "0",
            "REPRIEVE_TERMINATION_LOG": f"{folder}/termination-log",
        }
        Path(folder, "termination-log").touch()
        return _measure_in(folder)


def _measure_in(folder: str) -> dict[str, float]:
    from transformers import TrainerCallback

    from benchmarks.hf_script import Tokens
    from reprieve.adapters.transformers import protection
    from reprieve.adapters.transformers.training import ProtectedTraining
    from reprieve.data.torch_loader import TorchLoaderSource
    from reprieve.data.torch_pass import TorchLoaderPass
    from reprieve.transformers import protect

    trainer = protect(_trainer(folder, Tokens(64, 1)), notices="off")
    clock = _Clock()
    read: list[tuple[float, int]] = []
    events = next(one for one in trainer.callback_handler.callbacks if isinstance(one, protection._Events))
    for name in ("on_log", "on_epoch_end"):
        setattr(events, name, clock.ours(getattr(events, name)))

    # A fetch is Hugging Face's code, and Reprieve's part in it: it records the random numbers before.
    fetch, iterate = TorchLoaderPass._fetch, TorchLoaderSource.iterate

    def timed_iterate(*args: Any) -> Any:
        batches = iterate(*args)
        return iter(clock.theirs(lambda: next(batches, None)), None)

    hooks_of = ProtectedTraining._hooks

    def timed_hooks(training: ProtectedTraining) -> dict[str, Callable[..., Any]]:
        hooks = hooks_of(training)
        for name in hooks:
            setattr(trainer, name, clock.theirs(getattr(trainer, name)))
        return {name: clock.ours(hook) for name, hook in hooks.items()}

    class Warm(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.time_itself()
            if state.global_step in (_WARM, STEPS):
                read.append((clock.ns(), _sinks_ns()))

    trainer.add_callback(Warm())
    with (
        mock.patch.multiple(TorchLoaderPass, _fetch=clock.ours(fetch)),
        mock.patch.multiple(TorchLoaderSource, iterate=timed_iterate),
        mock.patch.multiple(ProtectedTraining, _hooks=timed_hooks),
    ):
        trainer.train()
    hooks, sinks = ((after - before) / (STEPS - _WARM) / 1000 for before, after in zip(*read, strict=True))
    found = {"hf.hooks_us": hooks + sinks, "hf.hooks.training_us": hooks, "hf.hooks.sinks_us": sinks}
    return {name: round(value, 2) for name, value in found.items()}


def _trainer(folder: str, data: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    args = TrainingArguments(
        f"{folder}/out",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=10,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    return Trainer(model, args, train_dataset=data)


class _Clock:
    """CPU time of this thread in Reprieve's hooks, less the code that they call, less the cost of the clock itself.
    The clock's cost is measured once per step: outside of the caches it takes five times as long as in a loop."""

    def __init__(self) -> None:
        self._ours_ns = self._calls = 0
        self._own_ns = self._own_calls = 0
        self._nothing = self.ours(self.theirs(lambda: None))

    def ns(self) -> float:
        return self._ours_ns - self._calls * self._own_ns / self._own_calls

    def time_itself(self) -> None:
        ours_ns, calls = self._ours_ns, self._calls
        self._nothing()
        self._own_ns += self._ours_ns - ours_ns
        self._own_calls += 1
        self._ours_ns, self._calls = ours_ns, calls

    def ours(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._timed(call, 1)

    def theirs(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Code that the hooks call."""
        return self._timed(call, -1)

    def _timed(self, call: Callable[..., Any], sign: int) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self._ours_ns += sign * (time.thread_time_ns() - began)
                self._calls += sign < 0

        return timed


def _sinks_ns() -> int:
    """CPU time so far of the threads that report progress."""
    return sum(
        time.clock_gettime_ns(time.pthread_getcpuclockid(one.ident))
        for one in threading.enumerate()
        if one.name.startswith("reprieve") and one.ident is not None
    )


if __name__ == "__main__":
    print(json.dumps(_measure()))
