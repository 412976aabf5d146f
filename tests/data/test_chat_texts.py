"""Texts of chat templates: those of transformers' `apply_chat_template`, for published styles."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import transformers.utils.chat_template_utils as library

from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.template import ChatTemplate
from hflow.runtime.tools.new_model import ALPHABET, character_tokenizer
from tests.data.chat_styles import (
    CALLED,
    ONE,
    STYLES,
    SYSTEM,
    THOUGHTS,
    TOOLS,
    TWO,
    asked,
    said,
    tokenizer_of,
    with_chat,
)

DATE = "2026-11-23"
CONVERSATIONS = {
    "question": ONE[:1],
    "answer": ONE,
    "two": TWO,
    "question again": TWO[:3],
    "thoughts": THOUGHTS,
    "thoughts again": THOUGHTS[:3],
    "calls": CALLED,
    "result": CALLED[:3],
}
ARGUMENTS: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"enable_thinking": True}]


class FrozenDate(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> FrozenDate:
        return cls.fromisoformat(DATE)


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks its own clock."""
    monkeypatch.setattr(library, "datetime", FrozenDate)


def theirs(style: str, messages: Any, tools: Any, prompts: bool, arguments: dict[str, Any]) -> str | None:
    """None where the template refuses the conversation."""
    try:
        text = tokenizer_of(style).fast.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompts, tokenize=False, **arguments
        )
    except Exception:
        return None
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["plain", "without thinking", "with thinking"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("style", STYLES)
def test_texts_are_those_of_transformers(style: str, tools: Any, arguments: dict[str, Any]) -> None:
    template = ChatTemplate(tokenizer_of(style), arguments=arguments, date=DATE)
    compared = 0
    for messages in CONVERSATIONS.values():
        for talk in (messages, [SYSTEM, *messages]):
            for prompts in (False, True):
                expected = theirs(style, talk, tools, prompts, arguments)
                if expected is None:
                    with pytest.raises(ChatProblem):
                        template.render(talk, tools, prompts)
                    continue
                assert template.render(talk, tools, prompts) == expected
                compared += 1
    # What a style has not: turns of the system (half), calls and results of tools (a quarter).
    assert compared >= (32 if STYLES[style].system else 16) * 5 // 8


@pytest.mark.parametrize("style", ["chatml", "qwen3", "llama3", "mistral"])
def test_tools_and_thoughts_are_in_the_texts(style: str) -> None:
    """So that the comparison above compares something."""
    template = ChatTemplate(tokenizer_of(style), date=DATE)
    text = template.render(CALLED, TOOLS)
    assert '"Adds two numbers, \\"a\\"' in text or 'Adds two numbers, "a"' in text
    assert "'b' <exactly>" in text and '"a": 1' in text and text != template.render(CALLED)
    if style == "qwen3":
        off = ChatTemplate(tokenizer_of(style), arguments={"enable_thinking": False}, date=DATE)
        assert off.render(ONE[:1], None, True).endswith("<think>\n\n</think>\n\n")
        assert "one and two" not in template.render(THOUGHTS) and "two and two" in template.render(THOUGHTS)


def test_the_date_is_that_of_the_plan_and_an_argument_overrides_it() -> None:
    tokenizer = tokenizer_of("llama3")
    assert "Today Date: 23 Nov 2026\n" in ChatTemplate(tokenizer, date=DATE).render(ONE)
    assert "Today Date: 01 Feb 2031\n" in ChatTemplate(tokenizer, date="2031-02-01").render(ONE)
    fixed = ChatTemplate(tokenizer, arguments={"date_string": "4 July"}, date=DATE)
    assert "Today Date: 4 July\n" in fixed.render(ONE)
    assert theirs("llama3", ONE, None, False, {"date_string": "4 July"}) == fixed.render(ONE)
    with pytest.raises(ChatProblem, match="asks for the date, and the plan has none"):
        ChatTemplate(tokenizer).render(ONE)


def test_named_templates_are_chosen_as_transformers_does() -> None:
    texts = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "rag": "R"}
    tokenizer = with_chat(character_tokenizer(ALPHABET), "chatml", texts)
    for name, tools in [(None, None), (None, TOOLS), ("rag", None), ("rag", TOOLS), ("default", TOOLS)]:
        expected = tokenizer.fast.apply_chat_template(ONE, chat_template=name, tools=tools, tokenize=False)  # type: ignore[arg-type]
        assert ChatTemplate(tokenizer, name).render(ONE, tools) == expected
    with pytest.raises(ChatProblem, match="no chat template called `rga`") as caught:
        ChatTemplate(tokenizer, "rga").render(ONE)
    assert caught.value.help == "did you mean `rag`?"
    texts.pop("default")
    with pytest.raises(ChatProblem, match="none is called `default`"):
        ChatTemplate(with_chat(character_tokenizer(ALPHABET), "chatml", texts)).render(ONE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "the tokenizer has no chat template"),
        ("{% if %}", "cannot be used: Expected an expression"),
        ("{{ messages | nothing }}", "cannot be used: No filter named 'nothing'"),
        ("{{ raise_exception('not so') }}", "refuses the conversation: not so"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ messages.copy() }}", "a list has no method `copy`"),
        ("{{ ''.__class__.__mro__ }}", "'__class__'"),
        ("{{ messages[0].nothing.nothing }}", "no attribute 'nothing'"),
        ("{{ none }}", "a null would be written as `None`"),
        ("{{ messages | random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ 'a' * 10**9 }}", "more than 100000000 characters"),
        ("{{ 'a' | center(10**9) }}", "more than 100000000 characters"),
        ("{{ 'a'.center(10**9) }}", "more than 100000000 characters"),
        ("{{ '%1000000000d' % 1 }}", "a width in `%`"),
        ("{{ '{:1000000000}'.format(1) }}", "`format` takes no widths"),
        ("{{ '{:{}}'.format('x', 300000000) }}", "`format` takes no widths"),
        ("{{ '{:{w}}'.format_map({'': 'x', 'w': 300000000}) }}", "`format` takes no widths"),
        ("{{ ('{0}' * 10**5).format('x' * 10**5) }}", "more than 100000000 characters"),
        ("{{ (['{0}' * 10**5] | map(attribute='format') | first)('x' * 10**5) }}", "100000000 characters"),
        ("{{ (5).to_bytes(300000000, 'big') | length }}", "`to_bytes` of type `int` cannot be called"),
        ("{{ (5 | attr('to_bytes'))(300000000, 'big') | length }}", "`to_bytes` of type `int` cannot"),
        ("{{ (0.5).hex() }}", "`hex` of type `float` cannot be called"),
        ("{{ dict.fromkeys(range(9)) }}", "`fromkeys` of type `type` cannot be called"),
        ("{% set m = {'a': 1} %}{{ dict.pop(m, 'a') }}", "`pop` of type `dict` cannot be called"),
        ("{{ 10 ** 99999 }}", "more than 10000 bits"),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "more than 100000000 characters",
        ),
        (
            "{% for i in range(9999) %}{% for i in range(9999) %}{% endfor %}{% endfor %}",
            "more than 1000000 operations",
        ),
        (
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(30) }}",
            "more than 1000000 operations",
        ),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_templates_that_do_too_much_or_nothing_are_refused(template: str | None, problem: str) -> None:
    tokenizer = with_chat(character_tokenizer(ALPHABET), "chatml", template)
    with pytest.raises(ChatProblem) as caught:
        ChatTemplate(tokenizer).render(ONE)
    assert problem in caught.value.message


def test_functions_and_methods_that_templates_may_call_are_called() -> None:
    template = (
        "{% set turn = cycler('a', 'b') %}{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}"
        "{% set comma = joiner('+') %}"
        "{% for i in [1, 2] %}{{ turn.next() }}{{ loop.cycle(3, 4) }}{{ loop.changed(i) }}{{ comma() }}"
        "{{ twice(i) }}{% endfor %}{% for c in [[1], 2] recursive %}"
        "{{ loop(c) if c is sequence else c }}{% endfor %}"
        "{{ '{} {x} {{}}'.format(1, x='y') }}{{ '{a[0]!r}'.format_map({'a': 'bc'}) }}"
        "{{ {'a': 1}.get('a') }}{{ 'x,y'.split(',') | length }}{{ strftime_now('%Y') }}{{ dict(a=1).a }}"
    )
    tokenizer = with_chat(character_tokenizer(ALPHABET), "chatml", template)
    written = ChatTemplate(tokenizer, date=DATE).render(ONE)
    given: Any = list(ONE)
    assert written == tokenizer.fast.apply_chat_template(given, tokenize=False)


def test_arguments_and_tools_that_no_template_reads_are_refused() -> None:
    template = ChatTemplate(tokenizer_of("qwen3"), arguments={"enable_thnking": False})
    with pytest.raises(ChatProblem, match="reads no `enable_thnking` of `template_args`") as caught:
        template.check(False)
    assert caught.value.help == "did you mean `enable_thinking`?"
    ChatTemplate(tokenizer_of("qwen3"), arguments={"enable_thinking": False}).check(True)
    ChatTemplate(tokenizer_of("llama3"), arguments={"date_string": "today"}).check(True)
    with pytest.raises(ChatProblem, match="reads no `tools`"):
        ChatTemplate(tokenizer_of("zephyr")).check(True)


def test_a_long_conversation_is_rendered() -> None:
    """The limits leave room for what people have: 300 turns, 600,000 characters."""
    messages = [m for i in range(150) for m in (asked(f"{i}" + "x" * 2000), said("y" * 2000))]
    for style in ("chatml", "qwen3", "mistral", "llama3"):
        text = ChatTemplate(tokenizer_of(style), date=DATE).render(messages)
        assert text == theirs(style, messages, None, False, {})
