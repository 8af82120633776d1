"""Positions in data as checkpoints hold them: the keys of earlier versions, and a version."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from reprieve.data.positions import (
    DatasetPosition,
    FetchedAhead,
    LoaderPosition,
    PassPosition,
    Redistribution,
    WorkerPosition,
)
from reprieve.data.resumable_loader import ResumableLoader
from reprieve.errors import StateMismatch
from tests.support.data_kit import Plain

DATASET = {"of": "iterator", "state": {"next": 4}, "ended": False}
WORKERS: list[dict[str, Any]] = [{"rng": {"cpu": torch.zeros(3)}, "data": DATASET}, {}]
PASS = {
    "consumed": 7,
    "start": {"cpu": torch.ones(2), "generators": {}},
    "ended": True,
    "dealt": {"samples": 20, "at": 5, "parts": [12, 8]},
    "read": 2,
    "size": 4,
    "apart": 1,
    "given": [1, 1],
    "dataset": DATASET,
    "workers": WORKERS,
    "workers_at_start": WORKERS,
    "last": 1,
    "reused": False,
    "ahead": {"cpu": torch.ones(2)},
    "loose": True,
    "loader": {"at": 3},
    "iteration": 2,
    "first": [torch.ones(2)],
}
"""A position with every key that version 1 knows, as code before the version field wrote it."""
LOADER = {
    "generators": {"loader.generator": torch.ones(2)},
    "seeds": {"loader.sampler": 3},
    "samplers": {"loader.sampler": {"passes": 1}},
    "made": {"cpu": torch.ones(2)},
    "workers": WORKERS,
    "dataset": {"left": [1]},
    "iteration": 2,
}


def test_a_pass_position_keeps_its_keys_on_disk() -> None:
    assert PassPosition.from_state(PASS).to_state() == {"version": 1, **PASS}


def test_a_loader_position_keeps_its_keys_on_disk() -> None:
    assert LoaderPosition.from_state(LOADER).to_state() == {"version": 1, **LOADER}


def test_positions_are_typed() -> None:
    position = PassPosition.from_state(PASS)
    assert position.redistribution == Redistribution(samples=20, first_batch=5, parts=[12, 8])
    assert position.dataset == DatasetPosition(holder="iterator", state={"next": 4})
    assert position.workers is not None
    assert position.workers[1] == WorkerPosition()


def test_fields_with_defaults_are_left_out() -> None:
    assert PassPosition(consumed=3, workers_reused=True).to_state() == {"version": 1, "consumed": 3}
    assert PassPosition.from_state({"consumed": 3}) == PassPosition(consumed=3)


def test_batches_fetched_ahead_by_workers_have_no_random_numbers() -> None:
    state = PassPosition(consumed=3, fetched_ahead=FetchedAhead(None)).to_state()
    assert state == {"version": 1, "consumed": 3, "ahead": None}
    assert PassPosition.from_state(state).fetched_ahead == FetchedAhead(None)


def test_states_load_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save([PassPosition.from_state(PASS).to_state(), LoaderPosition.from_state(LOADER).to_state()], file)
    file.seek(0)
    assert len(torch.load(file, weights_only=True)) == 2


@pytest.mark.parametrize("position", [PassPosition, LoaderPosition])
def test_a_position_of_a_newer_version_is_refused(position: type[PassPosition | LoaderPosition]) -> None:
    with pytest.raises(StateMismatch, match=r"version 2.*upgrade Reprieve"):
        position.from_state({"version": 2, "consumed": 3})


def test_a_loader_refuses_newer_positions() -> None:
    source = ResumableLoader(DataLoader(Plain(), 2))
    for load in (source.start, source.restore, source.length, lambda state: source.redistribute(state, 1)):
        with pytest.raises(StateMismatch, match="version 2"):
            load({"version": 2})


def test_a_position_without_a_version_resumes() -> None:
    loader = DataLoader(Plain(), 2)
    batches = ResumableLoader(loader).start()
    for _ in range(3):
        next(batches)
    batches.mark()
    state = batches.state()
    assert state.pop("version") == 1
    assert next(ResumableLoader(loader).start(state))["index"].tolist() == [6, 7]
