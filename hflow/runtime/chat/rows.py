"""Rows of a data node as conversations: the prompt, and what is learned after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hflow.graph.ir import Node
from hflow.plan.digests import CHAT_FILES
from hflow.runtime.chat.messages import (
    ASSISTANT,
    SYSTEM,
    USER,
    answers,
    common_start,
    continuation,
    conversation,
    field_of,
    tools_in,
    tools_of,
)
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.template import ChatMessage, ChatTemplate, Tools
from hflow.runtime.chat.tokens import TokenisedTurns, tokenised
from hflow.runtime.chat.turns import Turns, learned_turns
from hflow.runtime.tokenizer import Tokenizer

Row = Mapping[str, Any]
Texts = Mapping[str, Sequence[str]]  # rendered templates of all rows: `system`, `user`, `response 0`, ...
Refuse = Callable[[int, ChatProblem], Exception]  # what to raise for a problem with a row
CHUNK = 256  # rows that are tokenised at once


@dataclass(frozen=True)
class ChatRow:
    """Row `number` of the source, or one turn of it. `key` is equal for rows of which only all, or none, may
    be held out: those of one prompt, with `per_turn` of one beginning. Each of the `responses` has a mask."""

    number: int
    key: str
    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...] = ()
    masks: tuple[tuple[bool, ...], ...] = ()


@dataclass(frozen=True)
class _Talk:
    """Conversations of one prompt, their first `start` messages, and the numbers of the messages to learn."""

    number: int
    key: str
    tools: Tools
    start: int
    conversations: tuple[tuple[Sequence[ChatMessage], Sequence[int]], ...]


def chat_template(options: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
    """As the options of a node say."""
    return ChatTemplate(
        tokenizer, options.get("chat_template"), options.get("template_args") or {}, options.get("date") or ""
    )


def chat_rows(
    node: Node, rows: Sequence[Row], texts: Texts, tokenizer: Tokenizer, refuse: Refuse
) -> list[ChatRow]:
    """The rows of a data node, of `per_turn` one for each turn, in order.

    Args:
        texts: of the node's own templates, for every row.
        refuse: makes the error of a row's number and problem.

    Raises:
        what `refuse` makes: for the first row that is no conversation, or that the template refuses.
    """
    try:
        node = replace(node, options=_with_tools(node.options))
    except ChatProblem as problem:
        raise refuse(0, problem) from None
    template = chat_template(node.options, tokenizer)
    responds = any(str(output.type.dims[-1]) in ("seq~", "resp~") for output in node.outputs)
    out: list[ChatRow] = []
    for first in range(0, len(rows), CHUNK):
        numbers = range(first, min(first + CHUNK, len(rows)))
        out += _tokenised(node, numbers, rows, texts, template, responds, refuse)
    return out


def _tokenised(
    node: Node,
    numbers: Sequence[int],
    rows: Sequence[Row],
    texts: Texts,
    template: ChatTemplate,
    responds: bool,
    refuse: Refuse,
) -> Iterator[ChatRow]:
    found: list[tuple[_Talk, tuple[Turns, ...]]] = []
    for number in numbers:
        try:
            for talk in _talks(node.options, number, rows[number], texts, responds):
                template.check(talk.tools is not None)
                found.append((talk, _turns(template, talk, responds)))
        except ChatProblem as problem:
            raise refuse(number, problem) from None
    tokens = iter(tokenised(template.tokenizer, [turns for _, several in found for turns in several]))
    for talk, several in found:
        own = [next(tokens) for _ in several]
        for problem in own:
            if isinstance(problem, ChatProblem):
                raise refuse(talk.number, problem)
        yield _row(talk, [t for t in own if isinstance(t, TokenisedTurns)], responds)


def _row(talk: _Talk, own: Sequence[TokenisedTurns], responds: bool) -> ChatRow:
    if not responds:
        return ChatRow(talk.number, talk.key, own[0].prompt)
    responses, masks = tuple(t.response for t in own), tuple(t.mask for t in own)
    return ChatRow(talk.number, talk.key, own[0].prompt, responses, masks)


def _turns(template: ChatTemplate, talk: _Talk, responds: bool) -> tuple[Turns, ...]:
    if not responds:
        messages = talk.conversations[0][0][: talk.start]
        text = template.render(messages, talk.tools, prompts=True)
        return (Turns(text, len(text), ()),)
    several = tuple(
        learned_turns(template, messages, talk.start, learned, talk.tools)
        for messages, learned in talk.conversations
    )
    if len({turns.text[: turns.prompt] for turns in several}) > 1:
        raise ChatProblem("the chat template writes the prompt of the conversations differently")
    return several


def _talks(
    options: Mapping[str, Any], number: int, row: Row, texts: Texts, responds: bool
) -> Iterator[_Talk]:
    tools = _tools(options.get("tools"), row)
    conversations, start = _conversations(options, number, row, texts)
    if not responds:
        start = start or len(conversations[0])
        if conversations[0][start - 1]["role"] == ASSISTANT:
            message = "the conversation ends with the assistant's turn: there is nothing to answer"
            raise ChatProblem(message, "take it out of the column that `messages` names")
        yield _Talk(number, _key(conversations[0][:start], tools), tools, start, ((conversations[0], ()),))
        return
    learned = [answers(c, start) for c in conversations]
    if not all(learned):
        raise ChatProblem("there is nothing to learn: no message is the assistant's")
    if learned[0][0] == 0:
        raise ChatProblem("the conversation begins with the assistant's turn, and not with a prompt")
    key = _key(conversations[0][: learned[0][0]], tools)
    if options.get("per_turn"):
        for turn in learned[0]:
            yield _Talk(number, key, tools, turn, ((conversations[0][: turn + 1], [turn]),))
        return
    if options.get("learn") == "last":
        learned = [own[-1:] for own in learned]
    start = start or learned[0][0]
    yield _Talk(
        number, _key(conversations[0][:start], tools), tools, start, tuple(zip(conversations, learned))
    )


def _conversations(
    options: Mapping[str, Any], number: int, row: Row, texts: Texts
) -> tuple[list[list[ChatMessage]], int]:
    """The conversations of a row, and how many messages are the prompt; 0: the options do not say."""
    written = options.get("messages")
    names = [written] if isinstance(written, str) else list(written or ())
    begun: list[list[ChatMessage]] = [conversation(field_of(row, name), name) for name in names]
    if "user" in texts:
        begun = [[{"role": USER, "content": texts["user"][number]}]]
    if "system" in texts:
        begun = [_with_system(messages, texts["system"][number]) for messages in begun]
    after: list[list[ChatMessage]] = [
        [{"role": ASSISTANT, "content": rendered[number]}]
        for what, rendered in texts.items()
        if what.startswith("response")
    ]
    completion = options.get("completion")
    columns = [completion] if isinstance(completion, str) else list(completion or ())
    after += [continuation(field_of(row, name), name) for name in columns]
    if after:
        if any(own[0]["role"] != ASSISTANT for own in after):
            raise ChatProblem("a completion begins with the assistant's turn")
        return [[*begun[0], *own] for own in after], len(begun[0])
    return begun, common_start(begun) if len(begun) > 1 else 0


def _with_system(messages: list[ChatMessage], text: str) -> list[ChatMessage]:
    if messages[0]["role"] == SYSTEM:
        message = "the conversation has a message of the system, and `system` says another"
        raise ChatProblem(message, "leave `system` out, or take the message out of the data")
    return [{"role": SYSTEM, "content": text}, *messages]


def _with_tools(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, with the tools of a file in place of its name: read once for all rows."""
    written = options.get("tools")
    if not isinstance(written, str) or not written.endswith(CHAT_FILES["tools"]):
        return options
    return {**options, "tools": tools_in(Path(written))}


def _tools(written: Any, row: Row) -> Tools:
    if written is None:
        return None
    if isinstance(written, list | tuple):
        return list(written)
    return tools_of(field_of(row, written), written)


def _key(messages: Sequence[ChatMessage], tools: Tools) -> str:
    """The same whatever the template, its arguments and the date: they do not decide what is held out."""
    return json.dumps([messages, tools] if tools else messages, sort_keys=True, ensure_ascii=False)
