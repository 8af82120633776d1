"""The options of `reprieve finetune`: command line, then variable, then file, then default."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from reprieve.cli import execute
from reprieve.errors import ConfigError
from reprieve.finetune import main
from reprieve.finetune.options import CONFIG, OPTIONS, FinetuneOptions, add_arguments, resolve
from tests.support.places import ROOT

DOCS = ROOT / "docs/finetune.md"
NEEDED = {"model_name": "m", "dataset_path": "d"}
EVERY_OPTION: list[tuple[str, str, str, Any]] = [
    # name, variable, a text, what it means
    ("model_name", "MODEL_URI", "org/name", "org/name"),
    ("dataset_path", "DATASET_REPO_ID", "/data", "/data"),
    ("dataset_config", "DATASET_CONFIG", "main", "main"),
    ("dataset_split", "DATASET_SPLIT", "train_sft", "train_sft"),
    ("output_dir", "OUTPUT_DIR", "/out", "/out"),
    ("local_files_only", "LOCAL_FILES_ONLY", "true", True),
    ("add_special_tokens", "ADD_SPECIAL_TOKENS", "1", True),
    ("lora_rank", "LORA_RANK", "8", 8),
    ("lora_alpha", "LORA_ALPHA", "32", 32),
    ("lora_dropout", "LORA_DROPOUT", "0", 0.0),
    ("lora_targets", "LORA_TARGETS", "q_proj, v_proj", ("q_proj", "v_proj")),
    ("learning_rate", "LEARNING_RATE", "1e-5", 1e-5),
    ("batch_size", "BATCH_SIZE", "2", 2),
    ("accumulation", "GRADIENT_ACCUMULATION_STEPS", "4", 4),
    ("epochs", "MAX_EPOCHS", "2.5", 2.5),
    ("steps", "MAX_STEPS", "100", 100),
    ("max_length", "MAX_LENGTH", "64", 64),
    ("packing", "PACKING", "on", True),
    ("completion_only", "COMPLETION_ONLY", "no", False),
    ("eval_split", "EVAL_SPLIT", "0.1", 0.1),
    ("seed", "SEED", "0", 0),
    ("bf16", "BF16", "no", False),
    ("fp16", "FP16", "yes", True),
    ("gradient_checkpointing", "GRADIENT_CHECKPOINTING", "yes", True),
    ("merge", "MERGE", "yes", True),
]


def parsed(*words: str) -> dict[str, str | None]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return vars(parser.parse_args(words))


def test_the_table_has_every_option() -> None:
    assert {(row[0], row[1]) for row in EVERY_OPTION} == {(name, option.env) for name, option in OPTIONS.items()}


@pytest.mark.parametrize(("name", "variable", "text", "value"), EVERY_OPTION)
def test_command_line_then_variable_then_file_then_default(
    tmp_path: Path, name: str, variable: str, text: str, value: Any
) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({name: text}))
    needed = {key: NEEDED[key] for key in NEEDED if key != name}
    empty = {**needed, "config": str(file)}
    assert getattr(resolve({**needed, name: text}, {variable: "other"} if name != "model_name" else {}), name) == value
    assert getattr(resolve(needed, {variable: text}), name) == value
    assert getattr(resolve(empty, {variable: "  "}), name) == value
    assert getattr(resolve(empty, {}), name) == value
    if name not in NEEDED:
        assert getattr(resolve(needed, {}), name) == OPTIONS[name].default


@pytest.mark.parametrize("name", list(OPTIONS))
def test_either_spelling(name: str) -> None:
    for spelling in (name, *OPTIONS[name].spellings):
        assert parsed(f"--{spelling}", "x")[name] == "x"
        assert parsed(f"--{spelling.replace('_', '-')}=x")[name] == "x"


def test_a_flag_alone_means_yes() -> None:
    assert resolve({**NEEDED, **parsed("--model-name", "m", "--dataset_path", "d", "--merge", "--bf16")}, {}).merge
    assert parsed()["merge"] is None


@pytest.mark.parametrize("name", [*OPTIONS, "config"])
def test_the_table_in_the_docs_is_the_declaration(name: str) -> None:
    option = {**OPTIONS, "config": CONFIG}[name]
    [row] = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in DOCS.read_text(encoding="utf-8").splitlines()
        if re.match(rf"\| `--{name}[ `]", line)
    ]
    assert row[:3] == [
        f"`--{name}{f' {option.metavar}' if option.metavar else ''}`",
        f"`{option.env}`",
        option.default_text,
    ]
    assert row[3].startswith(option.help)
    assert all(f"`--{spelling}`" in row[3] for spelling in option.spellings)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("learning_rate", "high"), ("learning_rate", "0"), ("learning_rate", "-1"), ("learning_rate", "nan"),
        ("batch_size", "0"), ("batch_size", "1.5"), ("lora_dropout", "1"), ("lora_targets", " , "), ("epochs", "0"),
        ("steps", "-1"), ("max_length", "1"), ("eval_split", "1.5"), ("eval_split", "0"), ("seed", "-1"),
        ("bf16", "perhaps"), ("merge", "2"),
    ],
)  # fmt: skip
def test_a_bad_value_names_the_option_the_variable_or_the_file(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{name}: '{text}'\n")
    with pytest.raises(ConfigError, match=f"^--{name}: "):
        resolve({**NEEDED, name: text}, {})
    with pytest.raises(ConfigError, match=f"^{OPTIONS[name].env}: "):
        resolve(NEEDED, {OPTIONS[name].env: text})
    with pytest.raises(ConfigError, match=f"^{name} in .*job.yaml: "):
        resolve({**NEEDED, "config": str(file)}, {})


def test_what_is_missing_and_what_excludes_each_other() -> None:
    with pytest.raises(ConfigError, match=r"--model_name is missing: .* \(or set MODEL_URI\)"):
        resolve({}, {})
    with pytest.raises(ConfigError, match=r"--dataset_path is missing: .* \(or set DATASET_REPO_ID\)"):
        resolve({"model_name": "m"}, {})
    with pytest.raises(ConfigError, match="--bf16 and --fp16 exclude each other"):
        resolve({**NEEDED, "bf16": "yes", "fp16": "yes"}, {})


def test_a_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model-name: m\ndataset_path: d\nlearning_rate: 1e-4\nmerge: true\nlora_targets: [q, v]\nsteps:\n")
    options = resolve({}, {"FINETUNE_CONFIG": str(file)})
    assert (options.learning_rate, options.merge, options.lora_targets) == (1e-4, True, ("q", "v"))
    assert options.steps is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("learning-rat: 1\n", "there is no option 'learning-rat': do you mean learning_rate?"),
        ("hf_token: secret\n", "hf_token does not belong in a file. Set HF_TOKEN in the environment"),
        ("- a\n", "write a mapping"),
        ("a: [\n", "is neither YAML nor JSON"),
    ],
)
def test_a_bad_file(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        resolve({"config": str(file)}, {})
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        resolve({"config": str(tmp_path / "none.yaml")}, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rat", "1"], "unrecognized arguments: --learning_rat 1. --help lists the options"),
        (["--hf_token", "hf_notMine"], "unrecognized arguments: --hf_token ***. --help lists the options"),
        (["--token=hf_notMine"], "unrecognized arguments: --token=***. --help lists the options"),
        (["--model_name"], "argument --model_name: expected one argument. --help lists the options"),
    ],
)
def test_an_option_that_is_none_is_a_permanent_failure(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """argparse would exit with 2, which a failure policy takes for a crash."""
    for start in (main, lambda words: execute(["finetune", *words])):
        assert start(words) == 42
        assert f"error: {message}\n" in capfd.readouterr().err


def test_derived_values() -> None:
    assert resolve(NEEDED, {}).alpha == 32
    assert resolve({**NEEDED, "lora_rank": "4", "lora_alpha": "5"}, {}).alpha == 5
    assert "output_dir" not in FinetuneOptions.that_matter(resolve(NEEDED, {}))
