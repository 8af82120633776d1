"""What the driver refuses, or warns of, before a run starts. The table of the docs has all of these messages."""

from __future__ import annotations

import ast
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
from ray.train import WorkerGroupError

from reprieve import launcher_protocol
from reprieve.adapters.ray import driver, internals
from reprieve.adapters.ray.callback import JITCheckpointCallback
from reprieve.adapters.ray.config import JITCheckpointConfig
from reprieve.adapters.ray.controller import DriverStopped
from reprieve.adapters.ray.driver import DriverGuard, _check
from reprieve.adapters.ray.internals import WorkerContext
from reprieve.adapters.ray.run import Run
from reprieve.errors import ConfigError
from reprieve.preemption.process_exit import Preempted
from tests.support.places import ROOT


def trainer(*, num_workers: int = 2, **options: Any) -> Any:
    return SimpleNamespace(
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers), run_config=ray.train.RunConfig(**options)
    )


def test_a_run_in_the_driver_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_workers=0 .* Use ScalingConfig\(num_workers=1\), or reprieve.Run"):
        _check(trainer(num_workers=0, name="run"))


def test_a_run_without_a_name_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    _check(trainer())
    assert "this run has no name: if its driver stops, the next one starts over" in caplog.text


def test_a_run_with_a_name_is_accepted_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    _check(trainer(name="ray_train_run-of-mine"))
    assert caplog.records == []


# Who watches for stops, and when


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard leaves no traces in this process."""
    monkeypatch.setattr(driver, "show_logs", lambda: None)
    monkeypatch.setattr(driver.process_exit, "prepare", lambda: None)
    for name, value in internals.POLL_INTERVALS_S.items():
        monkeypatch.setenv(name, value)


class Fit:
    """Ray's `fit()` in a driver with `RAY_TRAIN_CALLBACKS`: it makes a callback, and keeps it until it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before = signal.getsignal(signal.SIGTERM)
        self.watched: list[bool] = []
        """Of each call: whether SIGTERM was handled in it, and its callback protected it."""
        self.protected: list[bool] = []
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(internals.DataParallelTrainer, "fit", lambda trainer: self._fit())

    def _fit(self) -> str:
        callback = JITCheckpointCallback()
        self.watched.append(signal.getsignal(signal.SIGTERM) is not self.before)
        self.protected.append(callback._protects)
        return "the result"

    def __call__(self, trainer: Any) -> Any:
        return internals.DataParallelTrainer.fit(trainer)


@pytest.mark.usefixtures("quiet")
def test_a_fit_that_the_environment_protects_is_watched_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch)
    for _ in range(2):
        assert fit(trainer(name="run")) == "the result"
        assert signal.getsignal(signal.SIGTERM) is fit.before, "SIGTERM would be swallowed"
    assert (fit.watched, fit.protected) == ([True, True], [True, True])


@pytest.mark.usefixtures("quiet")
def test_a_fit_that_is_watched_gets_no_second_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the `RunConfig` count, and not the defaults of the environment's callback."""
    fit = Fit(monkeypatch)
    protected = driver.protect(trainer(name="run", storage_path=str(tmp_path)))
    fit(protected)
    assert (fit.watched, fit.protected) == ([True], [False])
    fit(trainer(name="another"))
    assert fit.protected == [False, True]


@pytest.mark.usefixtures("quiet")
def test_each_fit_with_a_run_config_is_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that the controller of the first has published leads nowhere."""
    fit, protected = Fit(monkeypatch), driver.protect(trainer(name="run", storage_path=str(tmp_path)))
    runs = []
    for _ in range(2):
        fit(protected)
        runs.append(protected.run_config.callbacks[0].run_id)
    assert runs[0] != runs[1]


def test_a_run_outside_the_main_thread_is_warned_of(
    quiet: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def guarded() -> None:
        with DriverGuard(JITCheckpointCallback(JITCheckpointConfig(enabled=True)), str(tmp_path)):
            pass

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    assert "fit() runs outside the main thread: SIGTERM stops workers, but not this driver" in caplog.text


def test_a_permanent_failure_of_a_worker_ends_the_driver_with_it(quiet: None, tmp_path: Path) -> None:
    """Its exit code is 42 then: no restart helps."""
    guard = DriverGuard(JITCheckpointCallback(JITCheckpointConfig(enabled=True)), str(tmp_path))
    with pytest.raises(ConfigError, match="is relative"), guard:
        raise WorkerGroupError("a worker failed", {1: ConfigError("'checkpoints' is relative")})


@pytest.mark.parametrize(("name", "starts_over"), [("run", False), ("ray_train_run-2026-11-18_10-12-01", True)])
def test_the_launcher_learns_whether_the_next_driver_resumes(
    quiet: None, monkeypatch: pytest.MonkeyPatch, name: str, starts_over: bool
) -> None:
    sent = []
    monkeypatch.setattr(launcher_protocol.Reporter, "send", lambda reporter, message, **options: sent.append(message))
    monkeypatch.setattr(driver.process_exit, "schedule", lambda seconds: None)
    guard = DriverGuard(JITCheckpointCallback(JITCheckpointConfig(enabled=True)), f"/results/{name}")
    with pytest.raises(Preempted), guard:
        raise DriverStopped(RuntimeError("SIGTERM"), saved_step=7)
    [stopped] = [message for message in sent if isinstance(message, launcher_protocol.Stopped)]
    assert (stopped.step, stopped.saved, stopped.starts_over) == (7, True, starts_over)


def in_worker(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    context = WorkerContext(rank=0, world_size=1, local_rank=0, run_name="run", run_id="1", folder=folder)
    monkeypatch.setattr(internals, "worker_context", lambda: context)


@pytest.mark.parametrize("uri", ["checkpoints", "./checkpoints", Path("checkpoints")], ids=str)
def test_a_relative_folder_is_refused(uri: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_worker(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="is relative, and Ray changes the working directory: write an absolute path"):
        Run(uri)


def test_storage_that_is_no_file_system_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    in_worker(monkeypatch, None)
    with pytest.raises(ConfigError, match="the storage_path of this run is not in a file system"):
        Run()


# The table of the docs

OF_RAY = "the error of Ray"
VALUE = re.compile(r"…|: |[()]|'[^']*'|=\S+|/\S+|\d[\w.]*(?: s\b)?|SIG\w+|\bray\b")
"""What differs from message to message, and what was left out."""


def messages_of_the_docs() -> dict[str, list[str]]:
    """Each problem in the table, and its messages."""
    section = (ROOT / "docs/ray.md").read_text().partition("## When something is wrong")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    return {row[0].removeprefix("| "): re.findall(r"`(.*?)`", row[1]) for row in rows if OF_RAY not in row[1]}


def texts_of_the_code() -> list[str]:
    """All texts of the adapter and of what it calls, without the values in them."""
    texts = []
    for path in (ROOT / "src/reprieve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%(\.\d)?\w", "\0", node.value))
    return texts


def test_the_table_of_the_docs_has_the_messages_of_the_code() -> None:
    texts, messages = texts_of_the_code(), messages_of_the_docs()
    assert len(messages) > 20
    for problem, examples in messages.items():
        assert examples, problem
        for example in examples:
            parts = [part.strip(" .,:") for part in VALUE.split(example)]
            missing = [part for part in parts if part and not any(part in text for text in texts)]
            assert not missing, f"{problem}: {missing}"
