"""Snapshots of the random number generators equal what the generators report, with the fast path and without it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reprieve.rng import capture_rng, fast_path, restore_rng, snapshot_rng


@pytest.fixture(params=[True, False], ids=["fast", "plain"], autouse=True)
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(fast_path, "ENABLED", request.param)
    return bool(request.param)


def assert_snapshots_are_right() -> None:
    for snapshot in (snapshot_rng(), snapshot_rng(as_bytes=False)):
        plain = snapshot.plain()
        assert plain["python"] == random.getstate()
        name, words, *rest = np.random.get_state()
        assert plain["numpy"] == (name, words.tolist(), *rest)
        assert torch.equal(plain["cpu"], torch.get_rng_state())


def restore_pending_normal_numbers() -> None:
    """The words of the generators are the same with a pending number and without."""
    random.gauss(0, 1)
    np.random.normal()
    saved = capture_rng({})
    random.gauss(0, 1)
    np.random.normal()
    assert_snapshots_are_right()
    restore_rng(saved, {})


CHANGES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "python": random.random,
    "python, pending normal number": lambda: random.gauss(0, 1),
    "python, seeded": lambda: random.seed(3),
    "python, all words once": lambda: [random.random() for _ in range(312)],
    "numpy": np.random.rand,
    "numpy, pending normal number": np.random.normal,
    "numpy, seeded": lambda: np.random.seed(3),
    "numpy, all words once": lambda: np.random.rand(312),
    "torch": lambda: torch.rand(()),
    "torch, seeded": lambda: torch.manual_seed(3),
    "pending normal numbers restored": restore_pending_normal_numbers,
}


@pytest.mark.parametrize("name", CHANGES)
def test_snapshot_after_a_change(name: str) -> None:
    assert_snapshots_are_right()
    for _ in range(2):
        CHANGES[name]()
        assert_snapshots_are_right()


def test_snapshots_after_changes_in_any_order() -> None:
    order = random.Random(5)
    for _ in range(500):
        CHANGES[order.choice(list(CHANGES))]()
        assert_snapshots_are_right()


def test_other_bit_generators_of_numpy() -> None:
    original = np.random.get_bit_generator()
    try:
        for generator in (np.random.MT19937(4), np.random.PCG64(5)):
            np.random.set_bit_generator(generator)
            captured = capture_rng({})
            expected = np.random.rand()
            restore_rng(captured, {})
            assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(original)
    assert_snapshots_are_right()


def test_only_the_fast_path_keeps_an_unchanged_state(fast: bool) -> None:
    random.seed(1)
    np.random.seed(1)
    first, second = snapshot_rng(), snapshot_rng()
    assert first == second
    assert (first.python is second.python) == fast
    assert (first.numpy is second.numpy) == fast


@pytest.mark.parametrize(("value", "enabled"), [(None, True), ("1", True), ("0", False)])
def test_environment_variable_turns_the_fast_path_off(value: str | None, enabled: bool) -> None:
    environment = {key: text for key, text in os.environ.items() if key != "REPRIEVE_FAST_RNG"}
    if value is not None:
        environment["REPRIEVE_FAST_RNG"] = value
    command = [sys.executable, "-c", "from reprieve.rng import fast_path; print(fast_path.ENABLED)"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == f"{enabled}\n"
