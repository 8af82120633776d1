"""What a run tells of itself: its checkpoints after a resume and after retention, a save that fails, why it ended."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reprieve
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.errors import FolderInUse, RankFailed
from reprieve.launcher_protocol import LAUNCHER_SOCKET, Listener, Refused
from reprieve.progress.snapshot import Checkpoints, ListedCheckpoint, Progress
from reprieve.session.run_reporter import RunReporter
from reprieve.session.startup_errors import reporting_startup_errors
from reprieve.settings import resolve
from reprieve.storage.disk import Disk, OpenFile
from reprieve.testing.faulty_disks import SlowDisk

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The progress file."""
    monkeypatch.setenv("TRAINING_PROGRESS_FILE", str(tmp_path / "progress.json"))
    return tmp_path / "progress.json"


def make(folder: Path, width: int = 2, **options: Any) -> reprieve.Run:
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return reprieve.Run(
        folder / "checkpoints", model=model, optimizer=optimizer, **{"every": "never", "notices": "off", **options}
    )


def train(run: reprieve.Run, steps: int) -> None:
    for _ in run.epochs(steps=steps):
        for _batch in run.batches(range(100)):
            run.step()


def snapshot(run: reprieve.Run) -> Progress:
    return run._session.reporter.tracker.snapshot()


def saves(run: reprieve.Run) -> Checkpoints:
    return snapshot(run).checkpoints


# Checkpoints


def test_after_a_resume_the_newest_is_the_one_that_was_restored(tmp_path: Path) -> None:
    train(make(tmp_path), 3)
    [found] = list_checkpoints(tmp_path / "checkpoints")
    with make(tmp_path) as run:
        at = found.created.timestamp()
        assert saves(run) == Checkpoints(
            latest=str(found.path),
            latest_at=at,
            latest_bytes=found.bytes,
            created=1,
            valid=1,
            listed=(ListedCheckpoint(path=str(found.path), step=3, created_at=at, bytes=found.bytes, epoch=0.0),),
        )


def test_what_retention_removes_is_not_counted(tmp_path: Path) -> None:
    run = make(tmp_path, every=1, keep=2)
    train(run, 6)
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 2
    assert (saves(run).created, saves(run).valid) == (6, 2)
    assert [each.step for each in saves(run).listed] == [6, 5]
    took_s = saves(run).last_save_s
    assert took_s is not None and took_s > 0


def test_the_counters_do_not_fall_when_a_run_is_started_again(tmp_path: Path) -> None:
    """Retention has removed four of six checkpoints; the newest of those that are left is damaged."""
    train(make(tmp_path, every=1, keep=2, name="job-1"), 6)
    for restarts, created in ((1, 6), (2, 6)):
        with make(tmp_path, every=1, keep=2, name="job-1") as run:
            assert (snapshot(run).run, snapshot(run).restarts, saves(run).created) == ("job-1", restarts, created)
        weights = tmp_path / "checkpoints" / "checkpoint-6" / "model.safetensors"
        if weights.exists():
            weights.write_bytes(weights.read_bytes()[:-1])
    run = make(tmp_path, every=1, keep=2, name="job-1")
    assert saves(run).created == 6, "the damaged one is quarantined now"
    assert [(each.step, each.problem is None) for each in saves(run).listed] == [(6, False), (5, True)]
    train(run, 8)
    assert saves(run).created == 9
    assert list_checkpoints(tmp_path / "checkpoints")[0].manifest.number == 9  # type: ignore[union-attr]


def test_counters_that_are_not_known_are_null(told: Path, tmp_path: Path) -> None:
    """A run that cannot begin would otherwise look as if its counters had fallen to zero."""
    train(make(tmp_path), 2)
    with pytest.raises(reprieve.StateMismatch):
        make(tmp_path, width=3)
    found = json.loads(told.read_text())
    assert (found["restarts"], found["checkpointing"]["checkpointsCreated"]) == (None, None)


class Failing(Disk):
    """Takes no weights: a save fails in the background."""

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        if file.path.suffix == ".safetensors":
            raise OSError(5, "Input/output error", str(file.path))
        super().write(file, data, offset)


def test_a_save_that_failed_is_no_longer_under_way(tmp_path: Path) -> None:
    with make(tmp_path, every=2, disk=Failing()) as run:
        for _ in run.batches(range(4)):
            run.step()
        assert run._session.checkpointer.drain_save() is not None
        assert saves(run) == Checkpoints(created=0, valid=0)


def test_how_much_of_a_save_is_written(tmp_path: Path) -> None:
    """Waited for, or in the background."""
    seen: list[tuple[int, float | None]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            if (now := saves(run)).saving is not None:
                seen.append((now.saving, now.saving_fraction))

    with make(tmp_path, width=256, every=2, disk=SlowDisk(2_000_000)) as run:
        looking = threading.Thread(target=look)
        looking.start()
        for _ in run.batches(range(2)):
            run.step()
        run.checkpointer.wait()
        over.set()
        looking.join()
        assert saves(run).saving is None
    assert {step for step, _ in seen} == {2}
    assert any(part is not None and 0 < part < 1 for _, part in seen)
    assert seen == sorted(seen)


def on_another_thread(folder: Path, **options: Any) -> Checkpoints:
    """Where no signal is heard."""
    found: list[Checkpoints] = []

    def begin() -> None:
        with make(folder, **options) as run:
            found.append(saves(run))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    return found[0]


def test_is_anything_saved_before_the_end(tmp_path: Path) -> None:
    with make(tmp_path, every="never") as run:
        assert saves(run).enabled, "a stop is"
    with make(tmp_path, every="never", signals=["SIGUSR1"]) as run:
        assert saves(run).enabled
    assert not on_another_thread(tmp_path, every="never").enabled
    assert on_another_thread(tmp_path, every=5).enabled


def test_that_signals_are_heard_is_said_only_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER", "1")
    on_another_thread(tmp_path)
    with make(tmp_path, signals=["SIGUSR1"]):
        pass
    assert "[Kubeflow]" not in capfd.readouterr().err
    with make(tmp_path):
        pass
    assert "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM" in capfd.readouterr().err


@pytest.mark.parametrize(("local_rank", "printed"), [("0", True), ("1", False)])
def test_the_log_of_each_pod_shows_that_signals_are_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], local_rank: str, printed: bool
) -> None:
    """Rank 0 is in one pod only. In the others a missing line would mean that they are not protected."""
    with make(tmp_path) as run:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        reporter = RunReporter(2, 4, resolve({}), bar=False)
        checkpointer = run._session.checkpointer
        reporter.started(None, finished=False, checkpointer=checkpointer, handled_signals=[signal.SIGTERM])
    assert capfd.readouterr().err.count("[Kubeflow] JIT checkpointing enabled") == printed


# The end


def test_the_last_step_is_told(tmp_path: Path, told: Path) -> None:
    """They are looked at 20 times a second."""
    train(make(tmp_path), 25)
    found = json.loads(told.read_text())
    assert (found["state"], found["step"], found["totalSteps"]) == ("finished", 25, 25)


def test_a_run_that_was_finished_before_says_so(tmp_path: Path, told: Path) -> None:
    train(make(tmp_path), 3)
    train(make(tmp_path), 3)
    found = json.loads(told.read_text())
    assert (found["state"], found["percentComplete"], found["resumedFrom"]) == ("finished", "100.0", "checkpoint-3")


def test_a_run_that_was_finished_before_and_fails_when_more_is_asked_for(tmp_path: Path, told: Path) -> None:
    train(make(tmp_path), 3)
    with pytest.raises(ValueError, match="no"), make(tmp_path) as run:
        for _ in run.epochs(steps=6):
            for _batch in run.batches(range(100)):
                run.step()
                raise ValueError("no")
    found = json.loads(told.read_text())
    assert (found["state"], found["reason"], found["step"]) == ("failed", "ValueError: no", 4)


def test_an_error_in_the_loop_is_told(tmp_path: Path, told: Path) -> None:
    with pytest.raises(RuntimeError), make(tmp_path) as run:
        run.step()
        raise RuntimeError("the loss\nis not finite")
    found = json.loads(told.read_text())
    assert (found["state"], found["reason"], found["step"]) == ("failed", "RuntimeError: the loss is not finite", 1)


def test_why_a_run_could_not_begin_is_told(tmp_path: Path, told: Path) -> None:
    train(make(tmp_path), 2)
    with pytest.raises(reprieve.StateMismatch):
        make(tmp_path, width=3)
    found = json.loads(told.read_text())
    assert found["state"] == "failed"
    assert found["reason"].startswith("StateMismatch: ")


@pytest.fixture
def termination_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv("REPRIEVE_TERMINATION_LOG", str(path))
    return path


def test_who_may_not_have_the_folder_does_not_speak_for_whoever_has_it(told: Path, termination_log: Path) -> None:
    """Except to its own pod."""
    reporter = RunReporter(0, 1, resolve({}), bar=False)
    reporter.refused(FolderInUse("another run has it"))
    reporter.closing(0, finished=False)
    assert not told.exists()
    content = json.loads(termination_log.read_text())
    assert (content["state"], content["reason"]) == ("failed", "FolderInUse: another run has it")


def test_a_stop_before_the_run_has_begun_is_in_the_termination_log(told: Path, termination_log: Path) -> None:
    """An earlier attempt may still write the progress file."""
    reporter = RunReporter(0, 1, resolve({}), bar=False)
    reporter.stopping("SIGTERM", 0)
    reporter.stopped(0, saved=False, times={})
    assert not told.exists()
    content = json.loads(termination_log.read_text())
    assert (content["state"], content["reason"], content["currentStep"]) == ("stopped", "SIGTERM", 0)


@pytest.mark.parametrize(
    ("variable", "text"), [("REPRIEVE_GRACE", "soon"), ("CHECKPOINT_INTERVAL", "often"), ("CHECKPOINT_MAX_RETAIN", "0")]
)
def test_a_wrong_setting_is_in_the_termination_log(
    tmp_path: Path, termination_log: Path, monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    """There is no session yet to report it, and no launcher."""
    monkeypatch.setenv(variable, text)
    with pytest.raises(reprieve.ConfigError):
        make(tmp_path, **({"every": None} if variable == "CHECKPOINT_INTERVAL" else {}))
    content = json.loads(termination_log.read_text())
    found = content["reason"] or content["message"]
    assert content["state"] == "failed" and found.startswith("ConfigError: ") and text in found, content


@pytest.mark.parametrize("is_startup", [True, False])
def test_the_launcher_gets_a_refusal_without_secrets(monkeypatch: pytest.MonkeyPatch, is_startup: bool) -> None:
    """It shows that in the termination log, in `reprieve status` and in the run record."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    error = reprieve.ConfigError("checkpoints go to\nhttps://me:secret@host/0123456789abcdef" + " and on" * 100)
    listener = Listener()
    monkeypatch.setenv(LAUNCHER_SOCKET, str(listener.path))
    if is_startup:
        with pytest.raises(reprieve.ConfigError), reporting_startup_errors():
            raise error
    else:
        reporter = RunReporter(0, 1, resolve({}), bar=False)
        reporter.refused(error)
        reporter.closing(0, finished=False)
        reporter._reporter.close()
    refusals = [report.message for report in listener.read() if isinstance(report.message, Refused)]
    listener.close()
    assert refusals == [Refused(error="ConfigError: checkpoints go to\nhttps://***@host/***" + " and on" * 100)]


def test_only_the_first_rank_tells_why(told: Path) -> None:
    for rank in (1, 0):
        assert not told.exists()
        reporter = RunReporter(rank, 2, resolve({}), bar=False)
        reporter.refused(RankFailed(1, "StorageFull: no room", during="own"))
        reporter.closing(0, finished=False)
    assert json.loads(told.read_text())["reason"] == "StorageFull: no room"


def test_a_rank_that_died_is_told_before_the_process_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprieve.session.session.process_exit.schedule", lambda *args, **kwargs: None)
    with make(tmp_path) as run:
        run._session._on_lost_rank(RankFailed(1, "rank 1 does not answer"))
        assert (snapshot(run).state, snapshot(run).reason) == ("failed", "rank 1 does not answer")
