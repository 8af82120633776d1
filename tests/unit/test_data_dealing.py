"""What cannot be dealt out anew says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from data_kit import Plain, Unaware
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from reprieve.data.source import DataSource

KNOWN = {"consumed": 3, "read": 3, "size": 4}


class Growing(BatchSampler):
    """Its batches have no one size."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2], [3, 4, 5])


class Repeating(SequentialSampler):
    """As TRL's, by its attribute."""

    mini_repeat_count = 2


def _known(loader: Any, **more: Any) -> dict[str, Any] | None:
    return DataSource(loader).deal_again({**KNOWN, **more}, 1)


def test_a_plain_loader() -> None:
    loader = DataLoader(Plain(23), 5)
    position = _known(loader)
    assert position == {"consumed": 2, "dealt": {"samples": [12], "at": 2}}
    source = DataSource(loader)
    assert source.length(position) == 2 + 3
    one = source.start(position)
    first = next(one)
    one.mark()
    assert first["index"].tolist() == [12, 13, 14, 15, 16]
    assert [batch["index"].tolist() for batch in DataSource(loader).start(one.state())] == [[17, 18, 19, 20, 21], [22]]


def test_dealt_out_again_before_anything_was_given_out() -> None:
    position = _known(DataLoader(Plain(23), 5))
    assert position is not None
    source = DataSource(DataLoader(Plain(23), 3))
    assert source.deal_again(source.start(position).state(), 1) == {"consumed": 4, "dealt": {"samples": [12], "at": 4}}


def test_the_number_of_batches_is_a_multiple() -> None:
    position = DataSource(DataLoader(Plain(23), 2)).deal_again(KNOWN, 4)
    assert position == {"consumed": 4, "dealt": {"samples": [12], "at": 4}}


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Plain(), batch_sampler=Growing(SequentialSampler(Plain()), 2, drop_last=False)),
        DataLoader(Plain(), 2, sampler=Repeating(Plain())),
        DataLoader(Plain(), batch_size=None),
        [[1], [2]],
    ],
    ids=["a batch sampler of its own", "what belongs together", "no batches", "no loader"],
)
def test_a_loader_that_nobody_knows(loader: Any) -> None:
    assert _known(loader) is None


def test_a_position_that_does_not_say_how_much_it_is() -> None:
    assert DataSource(DataLoader(Plain(), 2)).deal_again({"consumed": 3}, 1) is None


def test_a_stream_with_other_workers() -> None:
    """They read other parts of it."""
    loader = DataLoader(Unaware(), 2, num_workers=2)
    assert _known(loader, workers=[{}, {}]) is not None
    assert _known(loader, workers=[{}]) is None
    assert _known(loader, workers=[{}, {}], dealt={"samples": [3], "at": 0}) is None
