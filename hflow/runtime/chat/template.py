"""The chat template of a tokenizer: texts of conversations, as transformers' ``apply_chat_template``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError

from hflow.bounded_read import UnreadableError, is_broken_text, read_text
from hflow.diagnostics import did_you_mean
from hflow.graph.templates.budget import BadTemplateError, Budget
from hflow.runtime.chat.environment import MAX_CHARACTERS, ChatEnvironment
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.tokenizer import Tokenizer

ChatMessage = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
MAX_BYTES = 2**24
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Marked:
    """A rendered conversation, and where ``{% generation %}`` marks what the assistant says: [start, end)."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations with the chat template of `tokenizer`.

    `name`: of one of several templates, or of a ``.jinja`` file; None: the tokenizer's own, or for rows with
    tools the one called ``tool_use``, if there is one. `arguments` are what the template reads besides, such
    as ``enable_thinking``; `date`, as ``2026-11-23``, is what it takes for today, empty if it must not ask.
    """

    tokenizer: Tokenizer
    name: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    date: str = ""

    def render(self, messages: Sequence[ChatMessage], tools: Tools = None, prompts: bool = False) -> str:
        """The text of a conversation; with `prompts`, it ends with what begins the assistant's turn.

        Raises:
            ChatProblem: there is no template, it refuses the conversation, or takes too much work.
        """
        template, _ = self._compiled(tools is not None)
        return self._guarded(
            lambda: template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompts, **self._names
            )
        )

    def marked(self, messages: Sequence[ChatMessage], tools: Tools = None) -> Marked:
        """As `render`, with the parts that the template marks as the assistant's. Raises as `render`."""
        template, _ = self._compiled(tools is not None)
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": False}

        def rendered() -> str:
            tracker: Any = self._environment
            with tracker.activate_tracker(blocks, spans):  # of transformers' `{% generation %}`
                for block in template.generate(**given, **self._names):
                    blocks.append(block)
            return "".join(blocks)

        text = self._guarded(rendered)
        return Marked(text, tuple((start, end) for start, end in spans if end > start))

    def has_marks(self, tools: Tools = None) -> bool:
        """Whether the template says by ``{% generation %}`` what the assistant says."""
        return bool(_MARK.search(self.text(tools is not None)))

    def check(self, has_tools: bool) -> None:
        """Raises ChatProblem where an argument, or the tools, would have no effect: it reads none."""
        _, read = self._compiled(has_tools)
        for name in sorted(self.arguments.keys() - read):
            known = read - {"messages", "tools", "add_generation_prompt", "documents", "strftime_now"}
            raise ChatProblem(
                f"the chat template reads no `{name}` of `template_args`",
                did_you_mean(name, known, "it reads"),
            )
        if has_tools and "tools" not in read:
            raise ChatProblem(
                "the chat template reads no `tools`",
                "describe them in `system`, or name another `chat_template`",
            )

    def text(self, has_tools: bool = False) -> str:
        """The template itself.

        Raises:
            ChatProblem: the tokenizer has none, none of this name, or several and no default.
        """
        if self.name and self.name.endswith(".jinja"):
            return _file(Path(self.name))
        found: Any = self.tokenizer.fast.chat_template
        if not found:
            raise ChatProblem(
                "the tokenizer has no chat template",
                "name a file: `chat_template: FILE.jinja`; or write the turns out: `prompt`",
            )
        names = list(found) if isinstance(found, dict) else ["default"]
        if self.name and self.name not in names:
            help_ = did_you_mean(self.name, names, "a name of these, or a FILE.jinja")
            raise ChatProblem(f"the tokenizer has no chat template called `{self.name}`", help_)
        if not isinstance(found, dict):
            return str(found)
        try:
            return self.tokenizer.fast.get_chat_template(self.name, [] if has_tools else None)
        except ValueError:
            raise ChatProblem(
                f"the tokenizer has the chat templates {', '.join(names)}, and none is called `default`",
                "`chat_template` names one",
            ) from None

    @cached_property
    def _environment(self) -> ChatEnvironment:
        return ChatEnvironment()

    @cached_property
    def _templates(self) -> dict[bool, tuple[Template, frozenset[str]]]:
        return {}

    def _compiled(self, has_tools: bool) -> tuple[Template, frozenset[str]]:
        """The template, and the names that it reads."""
        if has_tools not in self._templates:
            text = self.text(has_tools)
            try:
                self._templates[has_tools] = self._environment.compiled(text)
            except (TemplateError, BadTemplateError, ValueError, SyntaxError, RecursionError) as error:
                raise ChatProblem(f"the chat template cannot be used: {_said(error)}") from None
        return self._templates[has_tools]

    @cached_property
    def _names(self) -> dict[str, Any]:
        special = dict(self.tokenizer.fast.special_tokens_map)
        now = partial(self._strftime)  # a function for templates, which call no methods of ours
        return {**special, **self.arguments, "strftime_now": now}

    def _strftime(self, form: str) -> str:
        if not self.date:
            raise BadTemplateError(
                "it asks for the date, and the plan has none", "say it: `date: 2026-11-23`"
            )
        return datetime.fromisoformat(self.date).strftime(form)

    def _guarded(self, render: Callable[[], str]) -> str:
        self._environment.budget = Budget(MAX_CHARACTERS)
        try:
            text = render()
        except BadTemplateError as error:
            raise ChatProblem(f"the chat template: {error.message}", error.help) from None
        except Exception as error:  # of Python's and jinja2's functions, and what a template raises itself
            raise ChatProblem(f"the chat template refuses the conversation: {_said(error)}") from None
        if is_broken_text(text):
            raise ChatProblem("the text has a lone surrogate, half a character")
        return text


def _file(path: Path) -> str:
    try:
        return read_text(path, MAX_BYTES)
    except UnreadableError as error:
        help_ = "" if path.is_absolute() else f"it is looked for in `{Path.cwd()}`, where hflow runs"
        raise ChatProblem(f"chat template `{path}` cannot be read: {error}", help_) from None


def _said(error: BaseException) -> str:
    if isinstance(error, TemplateError | BadTemplateError):
        return str(error.message)
    return f"{type(error).__name__}: {error}"
