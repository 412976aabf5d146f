"""Options of `data` nodes whose rows are conversations, rendered by the chat template of the tokenizer.

A prompt comes from `messages`, columns of ``{role, content, ...}``, or from the texts `system` and `user`.
What follows it, to be learned from, is the rest of the conversation, a `completion` column, or the text of
`response`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any, cast

from hflow.graph.options import Option, OptionProblem

LEARN = ("all", "last")
OPTIONS = (
    Option("messages", "texts", optional=True),
    Option("system", "str", optional=True),
    Option("user", "str", optional=True),
    Option("completion", "texts", optional=True),
    Option("tools", "tools", optional=True),
    Option("chat_template", "str", optional=True),
    Option("template_args", "mapping", optional=True),
    Option("date", "str", optional=True),
    Option("learn", "str", optional=True, choices=LEARN),
    Option("per_turn", "bool", optional=True),
)
SOURCES = ("messages", "user")  # one of them says the prompt
TEMPLATES = ("system", "user")  # these are jinja2 templates over the fields of a row, as `prompt`
_OF_CHATS = ("system", "completion", "tools", "chat_template", "template_args", "date", "learn", "per_turn")
_OF_RESPONSES = ("completion", "learn", "per_turn")
# Names that transformers gives a template itself, or takes for itself.
RESERVED = frozenset((
    "messages", "conversation", "tools", "documents", "add_generation_prompt", "chat_template",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now", "raise_exception",
))  # fmt: skip
_OWN = {
    "messages": "option `messages`",
    "tools": "option `tools`",
    "chat_template": "option `chat_template`",
    "add_generation_prompt": "the column: prompts end with what begins the assistant's turn",
    "strftime_now": "option `date`",
}


def is_chat(options: Mapping[str, Any]) -> bool:
    """Whether a data node with these options renders conversations."""
    return any(options.get(name) is not None for name in SOURCES)


def conversations(written: Mapping[str, Any]) -> int | None:
    """How many conversations a row has, where `messages` or `completion` is a list; each is a row."""
    for name in ("messages", "completion"):
        if isinstance(written.get(name), list):
            return len(cast("list[Any]", written[name]))
    return None


def option_problems(written: Mapping[str, Any], ragged: bool, responds: bool) -> Iterator[OptionProblem]:
    """HF101 where it is not said what is learned, HF212 for options that exclude each other or have no
    effect.

    `ragged`: some column has tokens; `responds`: some has those of responses.
    """
    if not is_chat(written):
        for name in (n for n in _OF_CHATS if n in written):
            help_ = "`messages` or `user` say what is rendered by the chat template"
            yield OptionProblem("HF212", f"`{name}` has no effect without `messages` or `user`", name, help_)
        return
    yield from _excluded(written)
    yield from argument_problems(written)
    text = written.get("date")
    if isinstance(text, str) and not is_date(text):
        help_ = "year, month and day, like `2026-11-23`"
        yield OptionProblem("HF212", f"`date` must be a date, got `{text}`", "date", help_)
    if not ragged:
        for name in (n for n in (*SOURCES, *_OF_CHATS) if n in written and n not in _OF_RESPONSES):
            yield OptionProblem("HF212", f"`{name}` has no effect: no column has tokens", name)
    for name in (n for n in _OF_RESPONSES if n in written and not responds):
        yield OptionProblem("HF212", f"`{name}` has no effect: no column has `seq~` or `resp~`", name)
    if responds and not any(name in written for name in ("messages", "completion", "response")):
        help_ = "a jinja2 template of the answer, like `{{ answer }}`, or a column as `completion`"
        yield OptionProblem("HF101", "missing option `response`", None, help_)


def _excluded(written: Mapping[str, Any]) -> Iterator[OptionProblem]:
    pairs = {
        ("prompt", "messages"): "both say the prompt",
        ("prompt", "user"): "both say the prompt",
        ("user", "messages"): "both say the prompt",
        ("completion", "response"): "both say what follows the prompt",
        ("per_turn", "completion"): "turns of a conversation become rows, and a completion is not cut",
        ("per_turn", "response"): "turns of a conversation become rows, and a response is one",
    }
    for (one, other), reason in pairs.items():
        if one in written and other in written and written[one] is not False:
            yield OptionProblem("HF212", f"`{one}` beside `{other}`: {reason}", one, "write one of them")
    lists = isinstance(written.get("messages"), list)
    for name in ("completion", "response"):
        if lists and name in written:
            message = f"`{name}` beside a list of `messages`: the conversations themselves say what follows"
            yield OptionProblem("HF212", message, name, "name one column of prompts: `messages: prompt`")
    if written.get("per_turn") is True and lists:
        message = "`per_turn` beside a list of `messages`: rows of one prompt are compared as they are"
        yield OptionProblem("HF212", message, "per_turn")
    if written.get("per_turn") is True and "learn" in written:
        message = "`learn` beside `per_turn`: each turn is a row, and is learned"
        yield OptionProblem("HF212", message, "learn", "write one of them")


def argument_problems(written: Mapping[str, Any]) -> Iterator[OptionProblem]:
    """HF212 for names in `template_args` that are not the user's to give."""
    arguments = written.get("template_args")
    for name in sorted(RESERVED & arguments.keys()) if isinstance(arguments, dict) else ():
        help_ = f"that is said by {_OWN[name]}" if name in _OWN else ""
        message = f"`{name}` is no argument of a template: hflow or transformers uses the name itself"
        yield OptionProblem("HF212", message, "template_args", help_)


def is_date(text: str) -> bool:
    """Whether a text is a date as ``2026-11-23``."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
