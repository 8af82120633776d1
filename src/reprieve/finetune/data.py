"""Reads instruction data with `datasets`, and converts them to what TRL trains with.

    file or folder → rows (train, evaluation) → form of the columns → converted rows, checked against the tokenizer

`read_rows` needs no torch: wrong columns are refused before a model is loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprieve._version import __version__
from reprieve.errors import ConfigError
from reprieve.finetune.columns import CHAT, ColumnForm, converter, has_answer, has_turns, recognise
from reprieve.finetune.environment import print_once
from reprieve.finetune.options import FinetuneOptions
from reprieve.finetune.sources import listed

_LOADERS = {"json": "json", "jsonl": "json", "ndjson": "json", "csv": "csv", "tsv": "csv", "parquet": "parquet"}
_TRAIN = "train"
_SHOWN = 600
"""Characters of an error of `datasets`: a wrong configuration's lists those that there are."""
_WITHOUT_ROWS = ("corresponds to no data", "BatchSize must be greater than 0", "list index out of range")
"""What `datasets` raises for a text file, a Parquet file and a saved dataset without a row."""
_SAMPLED = 200
"""How many samples are tokenized to report how many are too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The data as they were read."""

    train: Any
    evaluation: Any | None
    form: ColumnForm

    @property
    def have_turns(self) -> bool:
        return has_turns(self.train[0], self.form)


def read_rows(path: Path, options: FinetuneOptions) -> Rows:
    """Read the data and recognise their form. Raises ConfigError for what nothing can be trained with."""
    shown = f"--dataset_path {options.dataset_path}"
    splits = _read(path, shown, options.dataset_config)
    name = options.dataset_split or (_TRAIN if len(splits) > 1 else next(iter(splits)))
    train = splits.get(name)
    if train is None:
        raise ConfigError(f"{shown} has no split {name}, but {listed(splits)}: choose one with --dataset_split")
    if not len(train):
        raise ConfigError(f"{shown} is empty: there is nothing to train with")
    form = recognise(train.column_names)
    evaluation = None
    if isinstance(options.eval_split, str):
        evaluation = splits.get(options.eval_split)
        if evaluation is None:
            raise ConfigError(f"--eval_split {options.eval_split}: {shown} has {listed(splits)}, and no such split")
        if not len(evaluation):
            raise ConfigError(f"--eval_split {options.eval_split} is empty")
    elif options.eval_split is not None:
        count = options.eval_split if isinstance(options.eval_split, int) else int(options.eval_split * len(train)) or 1
        if count >= len(train):
            raise ConfigError(f"--eval_split {options.eval_split} leaves nothing of {len(train)} samples to train with")
        # In memory: `datasets` would write the numbers of the rows beside the files of a saved dataset.
        order = random.Random(options.seed).sample(range(len(train)), len(train))  # noqa: S311 - not cryptography
        evaluation = train.select(sorted(order[:count]), keep_in_memory=True)
        train = train.select(sorted(order[count:]), keep_in_memory=True)
    return Rows(train=train, evaluation=evaluation, form=form)


def _read(path: Path, shown: str, config: str | None) -> dict[str, Any]:
    """Return the splits of the data by name. `config`: the configuration of a repository that has several."""
    import datasets

    with _refusing(shown):
        is_saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
        if config is not None and (is_saved or path.is_file()):
            raise ConfigError(f"--dataset_config {config}: {shown} has no configurations. Leave it out")
        if path.is_dir():
            if is_saved:
                saved = datasets.load_from_disk(str(path))
                return dict(saved) if isinstance(saved, dict) else {_TRAIN: saved}
            if not any(child.is_file() for child in path.rglob("*")):
                raise ConfigError(f"{shown} is an empty folder")
            return dict(datasets.load_dataset(str(path), config))
        kinds = [_LOADERS[suffix[1:]] for suffix in path.suffixes if suffix[1:] in _LOADERS]
        if not kinds:
            raise ConfigError(f"{shown} is no file of a known format: give .json, .jsonl, .csv or .parquet")
        if not path.stat().st_size or (path.stat().st_size < 16 and path.read_bytes().strip() in (b"", b"[]", b"{}")):
            raise ConfigError(f"{shown} is empty: there is nothing to train with")
        more = {"sep": "\t"} if ".tsv" in path.suffixes else {}
        return dict(datasets.load_dataset(kinds[-1], data_files=str(path), **more))


@contextlib.contextmanager
def _refusing(shown: str) -> Iterator[None]:
    """Turn what `datasets` raises, and logs, for data that it cannot read into one line."""
    import datasets
    from datasets.exceptions import DatasetsError

    verbosity = datasets.utils.logging.get_verbosity()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except ConfigError:
        raise
    except (DatasetsError, ValueError, TypeError, KeyError, IndexError, StopIteration, OSError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(str(cause).split()) or type(cause).__name__
        if "Config name is missing" in reason:
            names = re.search(r"available configs: \[(.*?)\]", reason)
            found = f": {names[1]}" if names else ""
            raise ConfigError(f"{shown} has several configurations{found}. Choose one with --dataset_config") from error
        if any(words in reason for words in _WITHOUT_ROWS):
            raise ConfigError(f"{shown} is empty: there is nothing to train with") from error
        raise ConfigError(f"{shown} cannot be read: {reason[:_SHOWN]}") from error
    finally:
        datasets.utils.logging.set_verbosity(verbosity)


def convert(rows: Rows, tokenizer: Any, options: FinetuneOptions, *, marks_answers: bool) -> tuple[Any, Any | None]:
    """Return the rows for training and evaluation as TRL reads them.

    `marks_answers`: the chat template marks the assistant's part, so that all answers of a conversation are learned.
    """
    split = rows.form.form == CHAT and options.completion_only and not marks_answers
    function = converter(rows.form, has_template=tokenizer.chat_template is not None, split_answer=split)
    train, evaluation = (
        None if data is None else _mapped(data, function).filter(has_answer) for data in (rows.train, rows.evaluation)
    )
    assert train is not None
    if missing := len(rows.train) - len(train):
        print_once(f"{missing} of {len(rows.train)} samples have no answer and are left out")
    if not len(train) or (evaluation is not None and not len(evaluation)):
        raise ConfigError(f"no sample of --dataset_path {options.dataset_path} has an answer: read as {rows.form}")
    return train, evaluation


def _mapped(data: Any, function: Any) -> Any:
    """Convert rows, with the result in the cache: `datasets` would write that of a saved dataset beside its files."""
    import datasets
    from datasets.fingerprint import Hasher

    cache = Path(datasets.config.HF_DATASETS_CACHE) / "reprieve"
    cache.mkdir(parents=True, exist_ok=True)
    name = Hasher.hash((__version__, data._fingerprint, repr(function)))
    # As JSON: a table would give each turn the keys of all others, and each call the arguments of all others.
    turns, text = datasets.List(datasets.Json()), datasets.Value("string")
    features = {column: turns if isinstance(value, list) else text for column, value in function(data[0]).items()}
    return data.map(
        function,
        remove_columns=data.column_names,
        cache_file_name=str(cache / f"{name}.arrow"),
        features=datasets.Features(features),
    )


def check_lengths(train: Any, tokenizer: Any, max_length: int) -> str | None:
    """Return a warning if samples are cut off. Raises ConfigError if all of them are longer than the limit."""
    shortest: int | None = None
    long = 0
    for number, row in enumerate(train):
        length = tokens_of(tokenizer, row, number)
        shortest = length if shortest is None else min(shortest, length)
        long += length > max_length
        if number + 1 >= _SAMPLED and long <= number:
            break
    seen = min(len(train), max(_SAMPLED, long))
    if long == len(train):
        raise ConfigError(
            f"all {len(train)} samples are longer than --max_length {max_length}: the shortest has {shortest} tokens. "
            f"Choose a higher limit"
        )
    return f"{long} of the first {seen} samples are longer than {max_length} tokens and are cut off" if long else None


def tokens_of(tokenizer: Any, row: Any, number: int = 0) -> int:
    """Return the number of tokens of a converted row. Raises ConfigError if the chat template refuses it."""
    if "messages" in row:
        content: Any = row["messages"]
    elif "prompt" in row:
        content = row["prompt"] + row["completion"]
    else:
        content = row["text"]
    if not isinstance(content, list):
        return len(tokenizer(content)["input_ids"])
    import jinja2

    tools = json.loads(row["tools"]) if row.get("tools") else None
    try:
        return len(tokenizer.apply_chat_template(content, tools=tools, tokenize=True, return_dict=True)["input_ids"])
    except jinja2.TemplateError as error:
        begin = next((turn["content"] for turn in content if turn["content"]), "")
        raise ConfigError(
            f"the chat template of the model refuses sample {number + 1}, which begins with {begin[:40]!r}: {error}. "
            "Change the data, or choose another model"
        ) from error


@contextlib.contextmanager
def explaining_template_errors(tokenizer: Any, *converted: Any) -> Iterator[None]:
    """Raise ConfigError for the sample that the chat template refuses, where TRL tokenizes all of them."""
    import jinja2

    try:
        yield
    except jinja2.TemplateError as error:
        for data in converted:
            for number, row in enumerate(data if data is not None else ()):
                tokens_of(tokenizer, row, number)
        raise ConfigError(f"the chat template of the model refuses the data: {error}") from error
