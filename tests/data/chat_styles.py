"""Tokenizers with chat templates in styles that are published, and conversations for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from hflow.runtime.tokenizer import Tokenizer
from hflow.runtime.tools.new_model import ALPHABET, character_tokenizer

FOLDER = Path(__file__).parent / "chat"
IM = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Style:
    """Special tokens, the one that ends a turn, and what the template takes."""

    special: tuple[str, ...]
    eos: str
    more_ends: tuple[str, ...] = ()
    bos: str | None = None
    system: bool = True
    tools: bool = False


STYLES = {
    "chatml": Style(IM, "<|im_end|>", tools=True),
    "qwen3": Style((*IM, "<think>", "</think>"), "<|im_end|>", tools=True),
    "llama3": Style(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        tools=True,
    ),
    "mistral": Style(
        (
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        "</s>",
        bos="<s>",
        tools=True,
    ),
    "gemma2": Style(("<start_of_turn>", "<end_of_turn>"), "<eos>", ("<end_of_turn>",), "<bos>", system=False),
    "phi": Style(
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
        "<|endoftext|>",
        ("<|end|>",),
        tools=True,
    ),
    "zephyr": Style((), "</s>", bos="<s>"),
    "deepseek_r1": Style(
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁output｜>"),
        "<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "command_r": Style(
        ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
    ),
    "marked": Style(IM, "<|im_end|>"),
}


def template_text(style: str) -> str:
    return (FOLDER / f"{style}.jinja").read_text()


@cache
def tokenizer_of(style: str, alphabet: str = ALPHABET) -> Tokenizer:
    """A character-level tokenizer with the special tokens and the chat template of a style."""
    return with_chat(character_tokenizer(alphabet), style, template_text(style))


def with_chat(fast: PreTrainedTokenizerFast, name: str, template: Any) -> Tokenizer:
    style = STYLES[name]
    tokens: dict[str, Any] = {"eos_token": style.eos}
    if style.bos:
        tokens["bos_token"] = style.bos
    fast.add_tokens([*style.special, *style.more_ends], special_tokens=True)
    fast.add_special_tokens(tokens)
    fast.chat_template = template
    more = frozenset(int(fast.convert_tokens_to_ids(t)) for t in style.more_ends)  # type: ignore[arg-type]
    assert isinstance(fast.eos_token_id, int) and isinstance(fast.pad_token_id, int)
    return Tokenizer(fast, fast.eos_token_id, fast.pad_token_id, more)


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers, \"a\" & 'b' <exactly>.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = said("", tool_calls=[{"id": "call12345", "type": "function",
                             "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}])  # fmt: skip
RESULT = {"role": "tool", "content": "3", "tool_call_id": "call12345"}
ONE = [asked("1 + 2?"), said("3")]
TWO = [*ONE, asked(" And 2 + 2? "), said("4 ")]
THOUGHTS = [
    asked("1 + 2?"),
    said("<think>\none and two\n</think>\n\n3"),
    asked("And 2 + 2?"),
    said("<think>\ntwo and two\n</think>\n\n4"),
]
CALLED = [asked("1 + 2?"), CALL, RESULT, said("It is 3.")]
