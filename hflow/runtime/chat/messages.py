"""Conversations in the fields of rows: lists of ``{role, content, ...}``, and lists of tools."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hflow.bounded_read import UnreadableError, parse_json, read_json
from hflow.diagnostics import did_you_mean
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.template import ChatMessage

MAX_TOOL_BYTES = 2**24
ASSISTANT, SYSTEM, USER = "assistant", "system", "user"
_SHAPE = "a list of messages, such as {role: user, content: ...}"
_FOREIGN = {"from": "role", "value": "content"}


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Raises ChatProblem when the row has no such field."""
    if name not in row:
        raise ChatProblem(f"no field `{name}`", did_you_mean(name, row, "fields"))
    return row[name]


def conversation(value: Any, name: str) -> list[ChatMessage]:
    """The messages in the field `name`, of which entries that are null are left out, but for `content`: files
    of columns have all keys in each message.

    Raises:
        ChatProblem: it is no list of messages.
    """
    if not isinstance(value, list) or not value:
        kind = "an empty list" if isinstance(value, list) else type(value).__name__
        raise ChatProblem(f"field `{name}` is {kind}", f"a conversation is {_SHAPE}")
    return [_message(entry, f"{name}[{number}]") for number, entry in enumerate(value)]


def continuation(value: Any, name: str) -> list[ChatMessage]:
    """The messages of a field with a conversation, or the text of an answer. Raises as `conversation`."""
    return [{"role": ASSISTANT, "content": value}] if isinstance(value, str) else conversation(value, name)


def tools_of(value: Any, name: str) -> list[Mapping[str, Any]] | None:
    """The tools in the field `name`, as a list or as JSON; None where it is null or an empty list.

    Raises:
        ChatProblem: it is neither.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except UnreadableError as error:
            raise ChatProblem(f"field `{name}` holds no list of tools: {error}") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ChatProblem(f"field `{name}` is no list of tools", "each is a JSON schema of a function")
    _check_plain(value, name)
    return value


def tools_in(path: Path) -> list[Mapping[str, Any]] | None:
    """The tools in a JSON file. Raises ChatProblem when there are none."""
    try:
        return tools_of(read_json(path, MAX_TOOL_BYTES), str(path))
    except UnreadableError as error:
        raise ChatProblem(f"tools `{path}` cannot be read: {error}") from None


def common_start(conversations: Sequence[Sequence[ChatMessage]]) -> int:
    """How many messages the conversations have in common before the assistant's that differ.

    Raises:
        ChatProblem: there are none, or what differs first is not the assistant's.
    """
    first = conversations[0]
    shared = min(map(len, conversations))
    same = next((i for i in range(shared) if any(c[i] != first[i] for c in conversations)), shared)
    while same and any(same >= len(c) or c[same].get("role") != ASSISTANT for c in conversations):
        same -= 1
    if not same:
        raise ChatProblem(
            "the conversations do not begin with the same prompt and go on with the assistant's turn"
        )
    return same


def answers(messages: Sequence[ChatMessage], start: int = 0) -> list[int]:
    """The numbers of the assistant's messages from `start` on."""
    return [i for i in range(start, len(messages)) if messages[i]["role"] == ASSISTANT]


def _message(entry: Any, name: str) -> ChatMessage:
    if not isinstance(entry, dict):
        raise ChatProblem(f"`{name}` is {type(entry).__name__}", f"a conversation is {_SHAPE}")
    foreign = [f"`{old}` is `{new}`" for old, new in _FOREIGN.items() if old in entry]
    if not isinstance(entry.get("role"), str) or not entry["role"]:
        raise ChatProblem(f"`{name}` has no `role`", "; ".join(foreign))
    if "content" not in entry and not entry.get("tool_calls"):
        raise ChatProblem(f"`{name}` has no `content`", "; ".join(foreign))
    if not isinstance(entry.get("content"), str | list | None):
        raise ChatProblem(f"the content of `{name}` is {type(entry['content']).__name__}, no text")
    _check_plain(entry, name)
    return {key: value for key, value in entry.items() if value is not None or key == "content"}


def _check_plain(value: Any, name: str) -> None:
    """Raises ChatProblem for what JSON has not: a template would write it as Python does."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_plain(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_plain(inner, f"{name}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ChatProblem(f"`{name}` is {value}, no finite number")
    elif not isinstance(value, str | int | float | None):
        raise ChatProblem(f"`{name}` is {type(value).__name__}, which JSON has not")
