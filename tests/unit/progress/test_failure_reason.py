"""The reason of a failure, without secrets."""

from __future__ import annotations

import pytest

from reprieve.errors import RankFailed, StateMismatch
from reprieve.progress.failure_reason import MAX_LENGTH, reason

TOKEN = "abcdefgh12345678"


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("CUDA out of memory"), "RuntimeError: CUDA out of memory"),
        (StateMismatch("two\n  lines\tof text\n"), "StateMismatch: two lines of text"),
        (RankFailed(2, "StateMismatch: another model", during="prepare"), "StateMismatch: another model"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Silent(), "Silent"),
    ],
)
def test_what_is_told_of_an_error(error: BaseException, told: str) -> None:
    assert reason(error, {}) == told


def test_paths_below_the_working_directory_are_told() -> None:
    """A shell sets this variable, and it is no password."""
    error = StateMismatch("/workspace/checkpoints is in use")
    assert reason(error, {"PWD": "/workspace"}) == "StateMismatch: /workspace/checkpoints is in use"


def test_a_long_one_is_cut() -> None:
    told = reason(StateMismatch("layer.weight, " * 10_000), {})
    assert len(told) == MAX_LENGTH
    assert told.startswith("StateMismatch: layer.weight, ")
    assert told.endswith("…")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("https://user:s3cret@host/x", "https://***@host/x"),
        ("https://s3cret@host/x", "https://***@host/x"),
        ("GET /x?a=1&X-Amz-Signature=ff00&b=2", "GET /x?a=1&X-Amz-Signature=***&b=2"),
        ("api_key='0123', code 7", "api_key='***', code 7"),
        ("Authorization: Bearer 0123456789", "Authorization: ***"),
        ("sent Bearer 0123456789 to it", "sent Bearer *** to it"),
        ("hf_abcdefghijklmnopqr is not valid", "*** is not valid"),
        ("sk-0123456789", "***"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, told: str) -> None:
    assert reason(ValueError(text), {}) == f"ValueError: {told}"


def test_what_the_environment_calls_a_secret_is_hidden() -> None:
    env = {"WANDB_API_KEY": TOKEN, "HF_TOKEN": "short", "FOLDER": "/a/folder"}
    told = reason(ValueError(f"{TOKEN} is short of /a/folder"), env)
    assert told == "ValueError: *** is short of /a/folder"


def test_a_secret_is_hidden_before_the_text_is_cut() -> None:
    told = reason(ValueError("x" * (MAX_LENGTH - 20) + TOKEN), {"MY_TOKEN": TOKEN})
    assert TOKEN[:4] not in told


@pytest.mark.parametrize(
    "text",
    ["Unexpected key(s) in state_dict: layer.weight", "KeyError in tokenizer", "see https://host/a@b", "1/2: a=3"],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert reason(ValueError(text), {}) == f"ValueError: {text}"
