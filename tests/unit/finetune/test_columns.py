"""The columns of instruction data: recognised, and converted to what TRL trains with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reprieve.errors import ConfigError
from reprieve.finetune.columns import ALPACA, CHAT, COMPLETION, TEXT, converter, has_answer, has_turns, recognise

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("names", "form", "columns"),
    [
        (["id", "messages"], CHAT, ("messages",)),
        (["conversations", "source"], CHAT, ("conversations",)),
        (["prompt", "prompt_id", "messages"], CHAT, ("messages",)),
        (["prompt", "completion"], COMPLETION, ("prompt", "completion")),
        (["answer", "question"], COMPLETION, ("question", "answer")),
        (["output", "input", "instruction", "text"], ALPACA, ("instruction", "input", "output")),
        (["instruction", "output"], ALPACA, ("instruction", "output")),
        (["instruction", "context", "response", "category"], ALPACA, ("instruction", "context", "response")),
        (["text"], TEXT, ("text",)),
    ],
)
def test_recognised(names: list[str], form: str, columns: tuple[str, ...]) -> None:
    found = recognise(names)
    assert (found.form, found.columns) == (form, columns)


@pytest.mark.parametrize("names", [["frage", "antwort"], ["prompt"], ["instruction", "input"], []])
def test_not_recognised(names: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=f"not recognised: {', '.join(names) or 'there are none'}. Known are messages"
    ):
        recognise(names)


def converted(row: dict[str, Any], *, has_template: bool = True, split_answer: bool = False) -> dict[str, Any]:
    return converter(recognise(list(row)), has_template=has_template, split_answer=split_answer)(row)


def test_chat() -> None:
    turns = [USER, ASSISTANT, USER]
    assert converted({"messages": turns}) == {"messages": [USER, ASSISTANT]}, "nothing answers the last turn"
    assert converted({"messages": turns}, split_answer=True) == {"prompt": [USER], "completion": [ASSISTANT]}
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert converted({"conversations": shared}) == {"messages": [USER, ASSISTANT]}
    assert converted({"messages": '[{"role": "user", "content": "a"}]'}) == {"messages": []}
    with pytest.raises(ConfigError, match="column messages holds 'hello', which is no turn of a conversation"):
        converted({"messages": ["hello"]})


def test_a_content_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "user", "content": parts}, {**ASSISTANT, "content": parts[1:]}]
    assert converted({"messages": turns}) == {"messages": [{**USER, "content": "ab"}, ASSISTANT]}
    for other in ({"type": "image", "url": "a.png"}, {"type": "text", "text": None}):
        with pytest.raises(ConfigError, match=r"column messages holds .*, which is no text: only text can be learned"):
            converted({"messages": [{"role": "user", "content": [*parts, other]}, ASSISTANT]})
    with pytest.raises(ConfigError, match="column answer holds "):
        converted({"question": "a", "answer": {"text": ["b"]}})


@pytest.mark.parametrize(
    ("name", "role"),
    [("Assistant", "assistant"), ("USER", "user"), ("GPT", "assistant"), ("observation", "tool"), ("System", "system")],
)
def test_roles(name: str, role: str) -> None:
    turns = converted({"conversations": [{"from": name, "value": "b"}, ASSISTANT]})["messages"]
    assert turns[0] == {"role": role, "content": "b"}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_and_their_calls() -> None:
    asks = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answers = {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"}
    row = {"messages": [USER, asks, answers, ASSISTANT], "tools": [TOOL]}
    expected = [USER, {**asks, "content": ""}, answers, ASSISTANT]
    assert converted(row) == {"messages": expected, "tools": json.dumps([TOOL])}
    assert converted(row, split_answer=True)["completion"] == [ASSISTANT]
    assert converted({"messages": [USER, asks]})["messages"] == expected[:2], "a call is an answer"
    # In a table, each value has the keys of all others.
    call = {**CALL, "function": {**CALL["function"], "arguments": {"a": 1, "b": None}}}  # type: ignore[dict-item]
    assert (
        converted({**row, "messages": [USER, {**asks, "tool_calls": [call], "name": None}]})["messages"] == expected[:2]
    )
    assert converted({**row, "tools": json.dumps([TOOL])})["tools"] == json.dumps([TOOL])
    assert converted({**row, "tools": None})["tools"] is None


def test_a_function_call_of_sharegpt() -> None:
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
    turns = [
        {"from": "human", "value": "a"},
        call,
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "b"},
    ]
    asks = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert converted({"conversations": turns}) == {
        "messages": [USER, asks, {"role": "tool", "content": "2"}, ASSISTANT]
    }
    plain = converted({"conversations": [{"from": "function_call", "value": "add 1"}]})["messages"]
    assert plain == [{"role": "assistant", "content": "add 1"}]


def test_prompt_and_completion() -> None:
    assert converted({"question": "a", "answer": "b"}) == {"prompt": "a", "completion": "b"}
    turns = {"prompt": [USER], "completion": [ASSISTANT]}
    assert converted({"prompt": [USER], "completion": [ASSISTANT]}) == turns
    assert converted({"prompt": [USER], "completion": "b"}) == turns, "a text beside turns is one turn"
    assert converted({"prompt": "a", "completion": [ASSISTANT]}) == turns
    assert converted({"prompt": [USER], "completion": "[1]"})["completion"] == [{**ASSISTANT, "content": "[1]"}]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"messages": "[]"}, True),
        ({"prompt": [USER], "completion": "b"}, True),
        ({"prompt": "a", "completion": [ASSISTANT]}, True),
        ({"prompt": "a", "completion": "b"}, False),
        ({"instruction": "a", "output": "b"}, False),
        ({"text": "a"}, False),
    ],
)
def test_rows_with_turns(row: dict[str, Any], turns: bool) -> None:
    assert has_turns(row, recognise(list(row))) == turns


def test_alpaca() -> None:
    row = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    turns = {
        "prompt": [{"role": "user", "content": "Add.\n\n1, 2"}],
        "completion": [{"role": "assistant", "content": "3"}],
    }
    assert converted(row) == turns
    plain = "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n"
    assert converted(row, has_template=False) == {"prompt": plain, "completion": "3"}
    assert converted({**row, "input": None})["prompt"] == [{"role": "user", "content": "Add."}]
    assert "Input" not in converted({**row, "input": " "}, has_template=False)["prompt"]


@pytest.mark.parametrize(
    "row",
    [{"messages": [USER]}, {"messages": None}, {"prompt": "a", "completion": None}, {"text": ""},
     {"instruction": "a", "output": None}, {"messages": [USER, {**ASSISTANT, "content": ""}]},
     {"prompt": [USER], "completion": [{**ASSISTANT, "content": None}]}, {"prompt": [USER], "completion": ""}],
)  # fmt: skip
def test_a_row_without_an_answer(row: dict[str, Any]) -> None:
    for split in (True, False):
        assert not has_answer(converted(row, split_answer=split))
