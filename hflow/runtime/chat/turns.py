"""Which parts of a rendered conversation the assistant says, and a model may learn.

Where a template marks them by ``{% generation %}``, its marks say so. Else they are what a conversation has
beyond its beginning: the text up to a turn, with the prompt for the assistant, must begin the text of the
whole; what follows, up to the first token that ends a response, is the turn, just as a model would have
sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.template import ChatMessage, ChatTemplate, Tools

_REWRITTEN = (
    "`per_turn: true` makes a row of each turn; `learn: last` learns the last one only; or"
    " `chat_template` names a template that leaves earlier turns as they are"
)


@dataclass(frozen=True)
class Turns:
    """The text of a conversation: [0, prompt) is what is answered, `spans` are what is learned, in order."""

    text: str
    prompt: int
    spans: tuple[tuple[int, int], ...]


def learned_turns(
    template: ChatTemplate, messages: Sequence[ChatMessage], start: int, learned: Sequence[int], tools: Tools
) -> Turns:
    """The conversation, of which messages before `start` are the prompt and the assistant's of numbers
    `learned` (ascending, from `start` on) are learned. What comes after the last of them is left out.

    Raises:
        ChatProblem: the template writes an earlier turn otherwise once there are later messages, does not
        write a
            turn after its own prompt for it, or ends it with no token that ends responses.
    """
    _check_contents(template, messages, learned)
    messages = messages[: learned[-1] + 1]
    marked = template.has_marks(tools)
    find = _marked if marked else _by_prefixes
    found = find(template, messages, start, learned, tools)
    for begin, end in found.spans:
        if not any(mark in found.text[begin:end] for mark in template.tokenizer.end_texts):
            raise _endless(template, found.text[begin:end], marked)
    return found


def _by_prefixes(
    template: ChatTemplate, messages: Sequence[ChatMessage], start: int, learned: Sequence[int], tools: Tools
) -> Turns:
    text = template.render(messages, tools)
    prompt = template.render(messages[:start], tools, prompts=True)
    spans: list[tuple[int, int]] = []
    for number in learned:
        before = template.render(messages[:number], tools, prompts=True)
        is_last = number == len(messages) - 1
        alone = text if is_last else template.render(messages[: number + 1], tools)
        end = _end(template, alone, len(before))
        if not alone.startswith(before):
            raise ChatProblem(*_unprompted(number, before, alone))
        if not text.startswith(alone[:end]):
            raise ChatProblem(*_rewritten(number, text, alone))
        spans.append((len(before), end))
    if not text.startswith(prompt):
        raise ChatProblem(*_unprompted(start, prompt, text))
    return Turns(text[: spans[-1][1]], len(prompt), tuple(spans))


def _marked(
    template: ChatTemplate, messages: Sequence[ChatMessage], start: int, learned: Sequence[int], tools: Tools
) -> Turns:
    whole = template.marked(messages, tools)
    spans: list[tuple[int, int]] = []
    for number in learned:
        before = len(template.marked(messages[:number], tools).spans) if number else 0
        alone = whole if number == len(messages) - 1 else template.marked(messages[: number + 1], tools)
        mine = alone.spans[before:]
        if not mine:
            message = f"the chat template marks nothing of message {number}, the assistant's, by "
            raise ChatProblem(message + "`{% generation %}`")
        if not whole.text.startswith(alone.text[: mine[-1][1]]):
            raise ChatProblem(*_rewritten(number, whole.text, alone.text))
        spans += mine
    prompt = template.render(messages[:start], tools, prompts=True)
    fits = whole.text.startswith(prompt) and len(prompt) <= spans[0][0]
    return Turns(whole.text[: spans[-1][1]], len(prompt) if fits else spans[0][0], tuple(spans))


def _end(template: ChatTemplate, text: str, begin: int) -> int:
    """Where the turn from `begin` on ends, with the first token that ends responses; the end of the text
    without one."""
    ends = [
        (at, at + len(mark)) for mark in template.tokenizer.end_texts if (at := text.find(mark, begin)) >= 0
    ]
    return min(ends)[1] if ends else len(text)


def _check_contents(template: ChatTemplate, messages: Sequence[ChatMessage], learned: Sequence[int]) -> None:
    for number in learned:
        content = messages[number].get("content")
        for mark in template.tokenizer.end_texts:
            if isinstance(content, str) and mark in content:
                message = f"message {number}, the assistant's, holds `{mark}`, which ends a response"
                raise ChatProblem(message, "take it out of the data: the chat template writes it")


def _unprompted(number: int, prompt: str, text: str) -> tuple[str, str]:
    at = _first_difference(prompt, text)
    message = (
        f"the chat template writes message {number} not after its own prompt for it, which goes on"
        f" {prompt[at : at + 40]!r} where the text has {text[at : at + 40]!r}"
    )
    help_ = (
        "`template_args` may change the prompt, as `enable_thinking: false` does; or name a `chat_template`"
    )
    return message, help_ + " that keeps what it prompts for"


def _rewritten(number: int, text: str, alone: str) -> tuple[str, str]:
    at = _first_difference(alone, text)
    message = (
        f"the chat template rewrites message {number}, the assistant's, once later ones follow:"
        f" {alone[at : at + 40]!r} becomes {text[at : at + 40]!r}; no model ever says that"
    )
    return message, _REWRITTEN


def _endless(template: ChatTemplate, turn: str, marked: bool) -> ChatProblem:
    ends = ", ".join(f"`{mark}`" for mark in sorted(template.tokenizer.end_texts))
    message = f"the chat template ends the assistant's turn {turn[-30:]!r} without a token that ends"
    message += f" responses ({ends})"
    if marked:
        return ChatProblem(message, "write it inside `{% generation %}`, or it is never learned")
    help_ = "name the token that ends a turn as `eos_token` in tokenizer_config.json, or in the list"
    return ChatProblem(message, f"{help_} `eos_token_id` of generation_config.json")


def _first_difference(one: str, other: str) -> int:
    shared = min(len(one), len(other))
    return next((i for i in range(shared) if one[i] != other[i]), shared)
