"""Rows of a `data` node as tokens, masks, texts and numbers, ready to be drawn."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any

from hflow.diagnostics import HflowError
from hflow.graph.infer.kinds import chat
from hflow.graph.ir import Node
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.rows import chat_rows
from hflow.runtime.data_files import refused
from hflow.runtime.engines.python.number_columns import read_numbers
from hflow.runtime.engines.python.row_texts import RowTexts
from hflow.runtime.text_field import text_of
from hflow.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Example:
    """Row `number` of the node's sources, ready to be drawn. Each of the `responses` ends with the end token.
    `numbers`: of every column of numbers one, or one for each response. `source`: the place of its source
    among the node's.

    `key` is the text of the prompt (of a conversation its messages) or, for a node without one, all of the
    row. `masks` say which tokens of the responses of a conversation are learned; empty: all of them.
    """

    number: int
    key: str
    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    fields: Mapping[str, str]
    numbers: Mapping[str, tuple[float, ...]] = default(default_factory=dict[str, tuple[float, ...]])
    source: int = 0
    masks: tuple[tuple[bool, ...], ...] = ()

    @property
    def content(self) -> Hashable:
        """What rows of the same content have in common: everything that the node hands on."""
        fields, numbers = tuple(self.fields.items()), tuple(self.numbers.items())
        return self.key, self.prompt, self.responses, fields, numbers


def tokenised(node: Node, texts: RowTexts, tokenizers: Mapping[str, Tokenizer]) -> list[Example]:
    """The rows of a `data` node, in order: one example of each, or of each turn that is learned by itself.

    Raises:
        HflowError: HF403 naming the row, when a field is missing or a text cannot be tokenised.
    """
    options = node.options
    if chat.is_chat(options):
        return _of_conversations(node, texts, tokenizers[options["tokenizer"]])
    tokenizer = tokenizers[options["tokenizer"]] if options.get("prompt") is not None else None
    return _of_templates(node, texts, tokenizer)


def fits(example: Example, options: Mapping[str, Any]) -> bool:
    """Whether no text of the example is longer than the node's options allow."""
    prompt_fits = len(example.prompt) <= options["max_prompt_tokens"]
    return prompt_fits and all(len(r) <= options["max_response_tokens"] for r in example.responses)


def lengths_text(examples: Sequence[Example], options: Mapping[str, Any]) -> str:
    """How long the texts are, beside what `fits` goes by: ``prompts have 3 to 9 tokens, max_prompt_tokens is
    8``."""
    found = {
        "prompts": ([len(e.prompt) for e in examples], "max_prompt_tokens"),
        "responses, with end of sequence,": (
            [len(r) for e in examples for r in e.responses],
            "max_response_tokens",
        ),
    }
    return "; ".join(
        f"{what} have {_range(lengths)} tokens, {option} is {options[option]:,}"
        for what, (lengths, option) in found.items()
        if any(lengths)
    )


def _range(lengths: Sequence[int]) -> str:
    least, most = min(lengths), max(lengths)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _of_templates(node: Node, texts: RowTexts, tokenizer: Tokenizer | None) -> list[Example]:
    """`tokenizer`: None for a node without columns of tokens."""
    rows = texts.rows
    prompts: list[list[int]] = [[] for _ in rows]
    responses: list[list[list[int]]] = []
    if tokenizer:
        keys = texts.render("prompt", node.options["prompt"])
        prompts = texts.encode("prompt", tokenizer, keys)
        rendered = {what: texts.render(what, t) for what, t in _responses(node.options).items()}
        responses = [texts.encode(what, tokenizer, column) for what, column in rendered.items()]
    else:
        keys = [json.dumps(row, sort_keys=True, default=str) for row in rows]
    fields, numbers = _fields(node, texts), read_numbers(node, texts)
    examples: list[Example] = []
    for place, (key, prompt) in enumerate(zip(keys, prompts)):
        if tokenizer and not prompt:
            raise refused(f"{texts.where(place)} has an empty prompt")
        ended = tuple((*column[place], tokenizer.eos_id) for column in responses) if tokenizer else ()
        number = texts.numbers[place]
        source = texts.found.of[number]
        examples.append(Example(number, key, tuple(prompt), ended, fields[place], numbers[place], source))
    return examples


def _fields(node: Node, texts: RowTexts) -> list[dict[str, str]]:
    """The columns of texts, of each row."""
    columns = [o.port for o in node.outputs if o.type.dtype == "str"]
    return [{f: text_of(texts.where(place), row, f) for f in columns} for place, row in enumerate(texts.rows)]


def _of_conversations(node: Node, texts: RowTexts, tokenizer: Tokenizer) -> list[Example]:
    """The rows of a node with conversations."""
    options = node.options
    own = {what: options[what] for what in chat.TEMPLATES if what in options}
    rendered = {what: texts.render(what, t) for what, t in (own | _responses(options)).items()}

    def refuse(place: int, problem: ChatProblem) -> HflowError:
        return refused(f"{texts.where(place)}: {problem.message}", problem.help)

    fields, numbers = _fields(node, texts), read_numbers(node, texts)
    examples: list[Example] = []
    for row in chat_rows(node, texts.rows, rendered, tokenizer, refuse):
        number = texts.numbers[row.number]
        own_fields, own_numbers, source = fields[row.number], numbers[row.number], texts.found.of[number]
        examples.append(
            Example(number, row.key, row.prompt, row.responses, own_fields, own_numbers, source, row.masks)
        )
    return examples


def _responses(options: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a row's responses, by what to call them."""
    response = options.get("response")
    if isinstance(response, list | tuple):
        return {f"response {number}": template for number, template in enumerate(response)}
    return {} if response is None else {"response": response}
