"""Generated training data for tests of Hugging Face's trainers, and a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.utils.data import Dataset, IterableDataset

from reprieve.ranks.failpoints import reached

if TYPE_CHECKING:
    from tests.support.jobs.hf_jobs import HfJob

VOCABULARY, LENGTH = 99, 16


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """A dataset that masks at random in `__getitem__`: each fetch draws from the global generators."""

    def __init__(self, count: int, seed: int, *, masking: bool = True) -> None:
        self._masking = masking
        self._data = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        reached("fetch")
        sample = self._data[index]
        return _masked(sample) if self._masking else {"input_ids": sample, "labels": sample}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same samples as a stream with a `state_dict`."""

    def __init__(self, count: int, seed: int) -> None:
        self._data = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
        self._next: int | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        if self._next is None:
            self._next = first
        while self._next < len(self._data):
            at, self._next = self._next, self._next + step
            yield _masked(self._data[at])
        self._next = None

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Forgetful(IterableDataset[dict[str, torch.Tensor]]):
    """A stream without a `state_dict`."""

    def __init__(self, data: Tokens) -> None:
        self._data = data

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(len(self._data)):
            yield self._data[index]


def _masked(sample: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": sample.masked_fill(torch.rand(LENGTH) < 0.2, 1), "labels": sample}


def pairs(count: int) -> Any:
    import datasets

    random = torch.Generator().manual_seed(count)
    words = [
        [f"w{token}" for token in row] for row in torch.randint(3, VOCABULARY, (count, 15), generator=random).tolist()
    ]
    return datasets.Dataset.from_list(
        [{"prompt": " ".join(row[:5]), "chosen": " ".join(row[5:10]), "rejected": " ".join(row[10:])} for row in words]
    )


def tokenizer() -> Any:
    """Build a tokenizer with one token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<mask>": 1, "<eos>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    built = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", mask_token="<mask>", eos_token="<eos>", model_max_length=32
    )


def texts(job: HfJob, seed: int, count: int | None = None, *, stream: bool | None = None) -> Any:
    import datasets

    random = torch.Generator().manual_seed(seed)
    # Each rank needs equally many rows of a stream, packed or not: stock TRL hangs otherwise.
    lengths = torch.randint(5, LENGTH, (count or job.samples,), generator=random)
    if job.stream:
        lengths.fill_(LENGTH // 2 - 1)
    words = [torch.randint(3, VOCABULARY, (int(length),), generator=random).tolist() for length in lengths]
    data = datasets.Dataset.from_dict({"text": [" ".join(f"w{token}" for token in text) for text in words]})
    if not (job.stream if stream is None else stream):
        return data
    if job.shuffled is not None:
        return data.to_iterable_dataset(num_shards=job.shuffled).shuffle(seed=5, buffer_size=20)
    return data.to_iterable_dataset(num_shards=12)


def encoded(sample: dict[str, Any]) -> dict[str, Any]:
    found = tokenizer()(sample["text"], padding="max_length", max_length=LENGTH)
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}
