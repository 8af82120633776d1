"""`Run` within one process: what it accepts, counts and says."""

from __future__ import annotations

import faulthandler
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reprieve
from reprieve.checkpoint.folder.catalog import list_checkpoints


def make(folder: Path, **options: Any) -> reprieve.Run:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return reprieve.Run(folder, model=model, optimizer=optimizer, **{"every": None, "notices": "off", **options})


def steps_of(folder: Path) -> list[int]:
    return [found.step for found in list_checkpoints(folder)]


def test_a_cell_of_a_notebook_that_runs_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reprieve")
    first = make(tmp_path)
    second = make(f"file://{tmp_path}")  # type: ignore[arg-type]
    assert "a new one begins" in caplog.text
    for _ in second.epochs(1):
        for _batch in second.batches([1, 2]):
            second.step()
    assert steps_of(tmp_path) == [2]
    first.close()


@pytest.mark.parametrize("has_launcher", [False, True])
def test_a_resume_is_logged_where_it_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, has_launcher: bool
) -> None:
    """As a warning; the launcher, if there is one, prints it instead."""
    monkeypatch.chdir(tmp_path)
    with make(tmp_path / "out") as run:
        assert "resuming" not in caplog.text
        for _ in run.epochs(1):
            for _batch in run.batches([1, 2]):
                run.step()
    if has_launcher:
        monkeypatch.setenv("REPRIEVE_LAUNCHER", str(tmp_path / "socket"))
    with make(tmp_path / "out") as run:
        run._session.reporter._reporter.close()
    if has_launcher:
        faulthandler.unregister(signal.SIGQUIT)
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert found == ([] if has_launcher else ["resuming from checkpoint-2 (step 2) in out"])


def test_handlers_are_there_while_a_run_is_open(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with make(tmp_path):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_cannot_begin_leaves_no_handler(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "file").write_text("")
    with pytest.raises(reprieve.StorageError):
        make(tmp_path / "file")
    assert signal.getsignal(signal.SIGTERM) is before


def test_numbers_are_kept_with_the_checkpoint(tmp_path: Path) -> None:
    run = make(tmp_path, every=2)
    for _ in run.epochs(1):
        for batch in run.batches([1, 2, 3, 4]):
            run.step(loss=torch.tensor(float(batch), requires_grad=True) * 2, rate=0.5)
        run.log(accuracy=1)
    found = {one.step: one.manifest.metrics for one in list_checkpoints(tmp_path) if one.manifest is not None}
    assert found == {2: {"loss": 4.0, "rate": 0.5}, 4: {"loss": 8.0, "rate": 0.5}}


@pytest.mark.parametrize("value", ["high", torch.zeros(3), None])
def test_what_is_not_a_number(value: Any, tmp_path: Path) -> None:
    with make(tmp_path) as run, pytest.raises(reprieve.ConfigError, match=r"loss is .* and not one number"):
        run.step(loss=value)


def test_epochs_without_a_number(tmp_path: Path) -> None:
    with make(tmp_path) as run, pytest.raises(reprieve.ConfigError, match="needs a number of epochs"):
        next(iter(run.epochs()))


@pytest.mark.parametrize(("option", "value"), [("grace_period", "soon"), ("signals", ["SIGKILL"]), ("notices", "moon")])
def test_settings_that_are_wrong(option: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(reprieve.ConfigError):
        make(tmp_path, **{option: value})


def test_a_checkpoint_without_a_place_in_the_data(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with reprieve.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(3)
    with pytest.raises(reprieve.StateMismatch, match=r"was not saved by reprieve\.Run"):
        make(tmp_path)


def test_saves_every_epoch_come_after_its_end(tmp_path: Path) -> None:
    run = make(tmp_path, every="epoch", keep="all")
    seen = []
    for epoch in run.epochs(3):
        for _batch in run.batches([1, 2]):
            run.step()
        seen.append((epoch, run.steps, steps_of(tmp_path)))
    assert [step for _, step, _ in seen] == [2, 4, 6]
    assert steps_of(tmp_path) == [6, 4, 2]


def test_where_the_run_is(tmp_path: Path) -> None:
    run = make(tmp_path)
    seen = []
    for _ in run.epochs(2):
        for _batch in run.batches([1, 2, 3]):
            if run.batch % 2 == 0:
                run.step()
            seen.append((run.epoch, run.batch, run.steps))
    assert seen == [(0, 1, 0), (0, 2, 1), (0, 3, 1), (1, 1, 1), (1, 2, 2), (1, 3, 2)]
    assert run.finished
