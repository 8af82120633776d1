"""A snapshot of the random number generators is what they themselves say, also where they are only looked at."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reprieve import rng
from reprieve.rng import capture_rng, restore_rng, snapshot_rng


def agree() -> None:
    for snapshot in (snapshot_rng(), snapshot_rng(as_bytes=False)):
        plain = snapshot.plain()
        assert plain["python"] == random.getstate()
        name, words, *rest = np.random.get_state()
        assert plain["numpy"] == (name, words.tolist(), *rest)
        assert torch.equal(plain["cpu"], torch.get_rng_state())


def put_back_half_a_pair() -> None:
    """The words are the same with it and without."""
    random.gauss(0, 1)
    np.random.normal()
    saved = capture_rng({})
    random.gauss(0, 1)
    np.random.normal()
    agree()
    restore_rng(saved, {})


CHANGES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "python": random.random,
    "python, half a pair": lambda: random.gauss(0, 1),
    "python, seeded": lambda: random.seed(3),
    "python, a round of its words": lambda: [random.random() for _ in range(312)],
    "numpy": np.random.rand,
    "numpy, half a pair": np.random.normal,
    "numpy, seeded": lambda: np.random.seed(3),
    "numpy, a round of its words": lambda: np.random.rand(312),
    "torch": lambda: torch.rand(()),
    "torch, seeded": lambda: torch.manual_seed(3),
    "half a pair is put back": put_back_half_a_pair,
}


@pytest.mark.parametrize("name", CHANGES)
def test_after(name: str) -> None:
    agree()
    for _ in range(2):
        CHANGES[name]()
        agree()


def test_in_any_order() -> None:
    order = random.Random(5)
    for _ in range(500):
        CHANGES[order.choice(list(CHANGES))]()
        agree()


def test_another_generator_of_numpy() -> None:
    own = np.random.get_bit_generator()
    try:
        for other in (np.random.MT19937(4), np.random.PCG64(5)):
            np.random.set_bit_generator(other)
            drawn = capture_rng({}), np.random.rand()
            restore_rng(drawn[0], {})
            assert np.random.rand() == drawn[1]
    finally:
        np.random.set_bit_generator(own)
    agree()


def test_what_did_not_change_is_not_read_again() -> None:
    random.seed(1)
    np.random.seed(1)
    one, other = snapshot_rng(), snapshot_rng()
    assert rng._python_seen is not None
    assert one.python is other.python
    assert one.numpy is other.numpy
