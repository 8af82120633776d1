"""The options of `reprieve finetune`: from the command line, the environment, a file and defaults, in this order.

Each is declared once, as a field of `FinetuneOptions`. The declaration feeds the command line with its help, the
environment variable, the keys of the `--config` file, and the table in docs/finetune.md (a test compares them).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NoReturn

from reprieve.errors import ConfigError
from reprieve.finetune.config_file import read_config
from reprieve.progress.redaction import masked
from reprieve.session.startup_errors import reporting_startup_errors
from reprieve.settings import Setting, parse_bool

ALL_LINEAR = "all-linear"
AUTO = "auto"


# How texts are parsed


def _number(kind: type[int] | type[float], *, least: float, below: float = float("inf"), example: str) -> Any:
    """Return the parser of a number. `least` is allowed for an int, and excluded for a float that is 0."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text.strip())
        except ValueError:
            value = kind(-1)
        if not least <= value < below or (kind is float and value == 0 and below == float("inf")):
            raise ConfigError(f"{text!r}: write {example}")
        return value

    return parse


def _parse_precision(text: str) -> bool | str:
    return AUTO if text.strip().lower() == AUTO else parse_bool(text)


def _parse_targets(text: str) -> str | tuple[str, ...]:
    names = tuple(name for name in text.replace(",", " ").split() if name)
    if not names:
        raise ConfigError(f"{text!r}: write names of modules like q_proj,v_proj, or {ALL_LINEAR}")
    return ALL_LINEAR if names == (ALL_LINEAR,) else names


def _parse_split(text: str) -> str | int | float:
    text = text.strip()
    try:
        share = float(text)
    except ValueError:
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if not 0 < share < 1:
        raise ConfigError(f"{text!r}: write the name of a split, a number of samples, or a share like 0.1")
    return share


# What an option is


@dataclass(frozen=True, slots=True)
class Option(Setting):
    """The declaration of one option."""

    spellings: tuple[str, ...] = ()
    """Other names on the command line, beside `--name_with_underscores` and `--name-with-hyphens`."""


_COUNT = _number(int, least=1, example="a whole number from 1 on")


def _flag(env: str, text: str, *, default: Any = False, parse: Callable[[str], Any] = parse_bool) -> dict[str, Option]:
    shown = {False: "no", True: "yes"}.get(default, default)
    return {"option": Option(env, text, default, parse, default_text=shown)}


def _value(
    env: str,
    text: str,
    default: Any = None,
    parse: Callable[[str], Any] = str.strip,
    *,
    metavar: str = "N",
    default_text: str | None = None,
    spellings: tuple[str, ...] = (),
) -> dict[str, Option]:
    shown = default_text or ("-" if default is None else f"{default:g}" if isinstance(default, float) else str(default))
    return {"option": Option(env, text, default, parse, metavar=metavar, default_text=shown, spellings=spellings)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneOptions:
    """The resolved options of one fine-tuning job."""

    model_name: str = field(
        metadata=_value(
            "MODEL_URI", "the model: a hub id (org/name, org/name@revision), a folder or a snapshot", metavar="MODEL"
        )
    )
    dataset_path: str = field(
        metadata=_value("DATASET_REPO_ID", "the data: a hub id, a folder, a saved dataset, or a file", metavar="DATA")
    )
    dataset_config: str | None = field(
        metadata=_value("DATASET_CONFIG", "the configuration of data that have several, like main", metavar="NAME")
    )
    dataset_split: str | None = field(
        metadata=_value(
            "DATASET_SPLIT",
            "the split to train with, like train_sft",
            metavar="SPLIT",
            default_text="train, or the only split",
        )
    )
    output_dir: str = field(
        metadata=_value("OUTPUT_DIR", "folder of the checkpoints and the result", "output", metavar="PATH")
    )
    local_files_only: bool = field(metadata=_flag("LOCAL_FILES_ONLY", "download nothing"))
    add_special_tokens: bool = field(
        metadata=_flag(
            "ADD_SPECIAL_TOKENS",
            "add to the tokenizer what it lacks: a padding token, and for chat data a chat template with its token",
        )
    )
    lora_rank: int = field(metadata=_value("LORA_RANK", "rank of the adapter", 16, _COUNT))
    lora_alpha: int | None = field(
        metadata=_value("LORA_ALPHA", "scale of the adapter", None, _COUNT, default_text="twice the rank")
    )
    lora_dropout: float = field(
        metadata=_value(
            "LORA_DROPOUT",
            "share of the adapter's inputs that is dropped",
            0.05,
            _number(float, least=0, below=1, example="a number from 0 to below 1, like 0.05"),
            metavar="SHARE",
        )
    )
    lora_targets: str | tuple[str, ...] = field(
        metadata=_value(
            "LORA_TARGETS",
            "modules that get an adapter: names like q_proj,v_proj, or all-linear",
            ALL_LINEAR,
            _parse_targets,
            metavar="NAMES",
        )
    )
    learning_rate: float = field(
        metadata=_value(
            "LEARNING_RATE",
            "the highest learning rate; it falls linearly to 0",
            2e-4,
            _number(float, least=0, example="a number above 0, like 2e-4"),
            metavar="RATE",
        )
    )
    batch_size: int = field(metadata=_value("BATCH_SIZE", "samples of one process in a batch", 4, _COUNT))
    accumulation: int = field(
        metadata=_value(
            "GRADIENT_ACCUMULATION_STEPS",
            "batches in one optimizer step",
            1,
            _COUNT,
            spellings=("gradient_accumulation_steps",),
        )
    )
    epochs: float = field(
        metadata=_value(
            "MAX_EPOCHS",
            "passes over the data",
            1.0,
            _number(float, least=0, example="a number above 0, like 3"),
            spellings=("num_train_epochs", "max_epochs"),
        )
    )
    steps: int | None = field(
        metadata=_value(
            "MAX_STEPS",
            "optimizer steps, in place of epochs",
            None,
            _COUNT,
            default_text="by epochs",
            spellings=("max_steps",),
        )
    )
    max_length: int = field(
        metadata=_value(
            "MAX_LENGTH",
            "tokens of a sample; longer ones are cut off",
            1024,
            _number(int, least=2, example="a whole number from 2 on"),
        )
    )
    packing: bool = field(metadata=_flag("PACKING", "put several short samples into one row"))
    completion_only: bool = field(
        metadata=_flag("COMPLETION_ONLY", "learn the answers only, and not the questions", default=True)
    )
    eval_split: str | int | float | None = field(
        metadata=_value(
            "EVAL_SPLIT",
            "evaluate after each epoch on a split of the data, or on a number or share of samples",
            None,
            _parse_split,
            metavar="SPLIT",
            default_text="no evaluation",
        )
    )
    seed: int = field(
        metadata=_value("SEED", "seed of all random numbers", 42, _number(int, least=0, example="a number from 0 on"))
    )
    bf16: bool | str = field(
        metadata=_flag("BF16", "compute in bfloat16; auto: on a GPU that can", default=AUTO, parse=_parse_precision)
    )
    fp16: bool = field(metadata=_flag("FP16", "compute in float16 with a loss scale"))
    gradient_checkpointing: bool = field(
        metadata=_flag("GRADIENT_CHECKPOINTING", "need less memory and more time: compute activations twice")
    )
    merge: bool = field(metadata=_flag("MERGE", "also write final/, a model with the adapter in its weights"))

    @property
    def alpha(self) -> int:
        return self.lora_alpha or 2 * self.lora_rank

    def that_matter(self) -> dict[str, Any]:
        """Return the options that change the result, as JSON has them."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name not in ("output_dir", "local_files_only")
        }


OPTIONS: Mapping[str, Option] = {entry.name: entry.metadata["option"] for entry in fields(FinetuneOptions)}
CONFIG = Option("FINETUNE_CONFIG", "YAML or JSON file with any of these options", metavar="FILE")
_REQUIRED = ("model_name", "dataset_path")


# The command line and the environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option, in either spelling: the one with underscores is shown. A wrong one raises ConfigError."""
    parser.error = _refuse  # type: ignore[method-assign]
    for name, option in {**OPTIONS, "config": CONFIG}.items():
        how: dict[str, Any] = {"metavar": option.metavar}
        if option.metavar is None:
            how = {"metavar": "yes|no", "nargs": "?", "const": "true"}
        default = f"; default: {option.default_text}" if option.default_text != "-" else ""
        parser.add_argument(f"--{name}", help=f"{option.help}{default} [{option.env}]", **how)
        for other in (name, *option.spellings):
            for spelling in {other, other.replace("_", "-")} - {name}:
                parser.add_argument(
                    f"--{spelling}", dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how
                )


def _refuse(message: str) -> NoReturn:
    """Take the place of argparse's exit with 2, which a job's failure policy would take for a crash, and retry.

    argparse repeats words that it does not know, and one may be a token: --hf_token is no option.
    """
    with reporting_startup_errors():
        raise ConfigError(f"{' '.join(masked(message.split(' ')))}. --help lists the options")


def resolve(given: Mapping[str, str | None], env: Mapping[str, str] = os.environ) -> FinetuneOptions:
    """Resolve all options. `given`: the texts of the command line by name, None where there is none."""
    file = given.get("config") or env.get(CONFIG.env, "").strip()
    configured = read_config(file, OPTIONS) if file else {}
    values = {}
    for name, option in OPTIONS.items():
        text, source = given.get(name), f"--{name}"
        if text is None:
            text, source = env.get(option.env, "").strip() or None, option.env
        if text is None:
            text, source = configured.get(name), f"{name} in {file}"
        if text is None:
            values[name] = option.default
            continue
        try:
            values[name] = option.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    for name in _REQUIRED:
        if not values[name]:
            raise ConfigError(f"--{name} is missing: give {OPTIONS[name].help} (or set {OPTIONS[name].env})")
    if values["fp16"] and values["bf16"] is True:
        raise ConfigError("--bf16 and --fp16 exclude each other: choose one")
    return FinetuneOptions(**values)
