"""Random numbers continue where they were."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from tests.support.helpers import Odd, restored, saved


def draw(generator: torch.Generator | None = None) -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()] + (
        [torch.rand(1, generator=generator).item()] if generator else []
    )


def test_random_numbers_continue_where_they_were(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    draw(generator)  # an odd number of normal numbers: each library keeps the second of a pair
    saved(tmp_path, generator=generator)
    want = [draw(generator) for _ in range(5)]
    other = torch.Generator()
    restored(tmp_path, generator=other)
    assert [draw(other) for _ in range(5)] == want


def test_saving_draws_nothing(tmp_path: Path) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    saved(tmp_path, model=Odd(x=torch.ones(2)))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_without_rng_the_global_generators_are_left_alone(tmp_path: Path) -> None:
    path = saved(tmp_path, state={}, rng=False)
    assert not (path / "rng_state.pth").exists()
    random.seed(5)
    want = random.random()
    random.seed(5)
    restored(tmp_path, state={}, rng=False)
    assert random.random() == want


def test_named_generators_are_saved_even_without_rng(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    saved(tmp_path, generator=generator, rng=False)
    want = torch.rand(3, generator=generator)
    restored(tmp_path, generator=generator, rng=False)
    assert torch.equal(torch.rand(3, generator=generator), want)


def test_another_bit_generator_of_numpy(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        saved(tmp_path, state={})
        want = np.random.rand()
        restored(tmp_path, state={})
        assert np.random.rand() == want
    finally:
        np.random.set_bit_generator(before)


def test_stock_transformers_restores_reprieves_random_numbers(tmp_path: Path) -> None:
    """With Trainer._load_rng_state, from the file name that it expects."""
    from transformers import Trainer

    class Args:
        world_size = 1
        process_index = 0
        parallel_mode = None

    class FakeTrainer:
        args = Args()
        is_in_train = True

    path = saved(tmp_path, state={})
    want = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    Trainer._load_rng_state(FakeTrainer(), str(path))  # type: ignore[arg-type]
    assert draw() == want
