"""Recognises the form of instruction data by its columns, and converts its rows to the columns that TRL trains with.

    messages | conversations                 chat: turns of a conversation
    prompt, completion | question, answer …  a prompt and its completion
    instruction, (input), output             Alpaca
    text                                     plain text

Nothing here needs a library: a decision about names, and a function for each row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprieve.errors import ConfigError

Row = Mapping[str, Any]

CHAT, COMPLETION, ALPACA, TEXT = "chat", "prompt/completion", "Alpaca", "text"
_CHAT_COLUMNS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("question", "response"))
_ALPACA = (
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("instruction", "input", "response"),
)
_TOOLS = "tools"
"""The column with what the model may call, which chat templates show before the conversation."""
_FUNCTION_CALL = "function_call"
_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "model", _FUNCTION_CALL), "assistant"),
    **dict.fromkeys(("observation", "tool_response", "function_response"), "tool"),
}
"""Other names of the roles, in lower case."""
_HELP = (
    "Known are messages (chat), prompt and completion, instruction and output with or without input (Alpaca), and "
    "text. Rename the columns"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnForm:
    """The form of some data, and the columns that it is read from."""

    form: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.form} (columns {', '.join(self.columns)})"


def recognise(names: Sequence[str]) -> ColumnForm:
    """Return the form of data with these columns: of several, the first in the table above. Raises ConfigError."""
    for name in _CHAT_COLUMNS:
        if name in names:
            return ColumnForm(form=CHAT, columns=(name,))
    for pair in _PAIRS:
        if set(pair) <= set(names):
            return ColumnForm(form=COMPLETION, columns=pair)
    for instruction, more, output in _ALPACA:
        if {instruction, output} <= set(names):
            middle = (more,) if more in names else ()
            return ColumnForm(form=ALPACA, columns=(instruction, *middle, output))
    if "text" in names:
        return ColumnForm(form=TEXT, columns=("text",))
    raise ConfigError(f"the columns of the data are not recognised: {', '.join(names) or 'there are none'}. {_HELP}")


def converter(found: ColumnForm, *, has_template: bool, split_answer: bool) -> Callable[[Row], dict[str, Any]]:
    """Return the function that converts a row. A row without an answer becomes one with an empty answer.

    `has_template`: the tokenizer has a chat template, so that Alpaca's rows become turns of a conversation.
    `split_answer`: a conversation becomes a prompt and its last answer, which alone is learned.
    """
    if found.form == CHAT:
        return _Chat(found.columns[0], split_answer=split_answer)
    if found.form == ALPACA:
        return _Alpaca(found.columns, has_template=has_template)
    return _Renamed(found)


@dataclass(frozen=True, slots=True)
class _Chat:
    column: str
    split_answer: bool

    def __call__(self, row: Row) -> dict[str, Any]:
        turns = messages_of(row[self.column], self.column)
        while turns and not _is_answer(turns[-1]):
            turns.pop()  # nothing answers it
        tools = {_TOOLS: _tools(row[_TOOLS])} if _TOOLS in row else {}
        if self.split_answer:
            return {"prompt": turns[:-1], "completion": turns[-1:], **tools}
        return {"messages": turns, **tools}


@dataclass(frozen=True, slots=True)
class _Alpaca:
    columns: tuple[str, ...]
    has_template: bool

    def __call__(self, row: Row) -> dict[str, Any]:
        instruction, *more, output = (_text(row[name], name) for name in self.columns)
        given = more[0].strip() if more else ""
        if self.has_template:
            question = f"{instruction}\n\n{given}" if given else instruction
            answer = [{"role": "assistant", "content": output}] if output else []
            return {"prompt": [{"role": "user", "content": question}], "completion": answer}
        parts = [f"### Instruction:\n{instruction}", *([f"### Input:\n{given}"] if given else []), "### Response:\n"]
        return {"prompt": "\n\n".join(parts), "completion": output}


@dataclass(frozen=True, slots=True)
class _Renamed:
    found: ColumnForm

    def __call__(self, row: Row) -> dict[str, Any]:
        if self.found.form == TEXT:
            return {"text": _text(row["text"], "text")}
        first, second = self.found.columns
        prompt, completion = row[first], row[second]
        if not isinstance(prompt, list) and not isinstance(completion, list):
            return {"prompt": _text(prompt, first), "completion": _text(completion, second)}
        tools = {_TOOLS: _tools(row[_TOOLS])} if _TOOLS in row else {}
        return {"prompt": _turns(prompt, first, "user"), "completion": _turns(completion, second, "assistant"), **tools}


def has_answer(row: Row) -> bool:
    """Whether a converted row has something to learn."""
    learned = row.get("completion") or row.get("messages") or row.get("text")
    return any(map(_is_answer, learned)) if isinstance(learned, list) else bool(learned)


def has_turns(row: Row, found: ColumnForm) -> bool:
    """Whether a row of the data holds turns of a conversation, which only a chat template turns into text."""
    return found.form == CHAT or any(isinstance(row[name], list) for name in found.columns)


def messages_of(value: Any, column: str) -> list[dict[str, Any]]:
    """Return turns with role and content, from ShareGPT's from and value as well, and from JSON in a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if value is None:
        return []
    return [_turn(turn, column) for turn in (value if isinstance(value, list) else [value])]


def _turn(turn: Any, column: str) -> dict[str, Any]:
    named = turn.get("role") or turn.get("from") if isinstance(turn, Mapping) else None
    if named is None:
        raise ConfigError(
            f"column {column} holds {str(turn)[:80]!r}, which is no turn of a conversation: write "
            '[{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'
        )
    role = str(named).strip().lower()
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    converted: dict[str, Any] = {"role": _ROLES.get(role, role), "content": _text(content, column)}
    calls = turn.get("tool_calls")
    if role == _FUNCTION_CALL and (calls := _shared_calls(content)):
        converted["content"] = ""
    if calls:
        converted["tool_calls"] = _without_none(calls)
    # What a chat template needs to know of the answer of a tool, and of an answer that was thought about.
    converted |= {
        name: str(turn[name]) for name in ("name", "tool_call_id", "reasoning_content") if turn.get(name) is not None
    }
    return converted


def _turns(value: Any, column: str, role: str) -> list[dict[str, Any]]:
    """Return the turns of a column beside one with turns: a text is one turn."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return messages_of(value, column)


def _shared_calls(content: Any) -> list[dict[str, Any]] | None:
    """Return the calls of ShareGPT's function_call, whose value is JSON; None: it is none."""
    try:
        calls = json.loads(content)
        return [
            {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
            for call in (calls if isinstance(calls, list) else [calls])
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _is_answer(turn: Row) -> bool:
    return turn["role"] == "assistant" and bool(turn["content"] or turn.get("tool_calls"))


def _tools(value: Any) -> str | None:
    """Return the tools as JSON, which TRL reads: a table would give each of them the keys of all others."""
    if not value or isinstance(value, str):
        return value or None
    return json.dumps(_without_none(value), ensure_ascii=False)


def _without_none(value: Any) -> Any:
    """Return a value without the keys that only other rows of a table have."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _text(value: Any, column: str = "") -> str:
    """Return a text, also of one in parts. Raises ConfigError for what a text model cannot read."""
    if isinstance(value, list) and all(isinstance(part, str | Mapping) for part in value):
        return "".join(part if isinstance(part, str) else _part(part, column) for part in value)
    if isinstance(value, list | Mapping):
        raise _no_text(value, column)
    return "" if value is None else str(value)


def _part(part: Row, column: str) -> str:
    if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        raise _no_text(part, column)
    return str(part["text"])


def _no_text(value: Any, column: str) -> ConfigError:
    return ConfigError(f"column {column} holds {str(value)[:80]!r}, which is no text: only text can be learned")
