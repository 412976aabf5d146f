"""`data` nodes: rows of a dataset as prompt tokens, prompt-response tokens, masks and strings."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any

import torch

from hflow.diagnostics import HflowError, did_you_mean
from hflow.graph.infer.kinds import chat
from hflow.graph.ir import Node, Output, evaluation_of
from hflow.graph.templates.budget import BadTemplateError
from hflow.graph.templates.null_field import guarded, unwritable
from hflow.graph.templates.template import Template
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.rows import chat_rows
from hflow.runtime.data_files import refused
from hflow.runtime.datasets import Dataset, hold_out, read_rows
from hflow.runtime.engines.protocol import EngineCall, Result
from hflow.runtime.engines.python.number_columns import read_numbers
from hflow.runtime.rows import Rows, from_lists, from_strings
from hflow.runtime.tokenizer import Tokenizer, UnknownTextError

RowValues = Mapping[str, Any]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """Row `number` of the source, ready to be drawn. Each of the `responses` ends with the end token.
    `numbers`: of every column of numbers one, or one for each response.

    `key` is the text of the prompt (of a conversation its messages) or, for a node without one, all of the
    row. `masks` say which tokens of the responses of a conversation are learned; empty: all of them.
    """

    number: int
    key: str
    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    fields: Mapping[str, str]
    numbers: Mapping[str, tuple[float, ...]] = default(default_factory=dict[str, tuple[float, ...]])
    masks: tuple[tuple[bool, ...], ...] = ()

    @property
    def content(self) -> Hashable:
        """What rows of the same content have in common: everything that the node hands on."""
        fields, numbers = tuple(self.fields.items()), tuple(self.numbers.items())
        return self.key, self.prompt, self.responses, fields, numbers


@dataclass(frozen=True)
class DataSource:
    """The tokenised rows of one `data` node."""

    dataset: Dataset[Example]

    def draw(self, call: EngineCall) -> Result:
        """This device's rows of the batch of `call.step`, or of the held-out rows.

        Raises:
            HflowError: HF403 when there are fewer rows than a batch needs.
        """
        options = call.node.options
        if call.evaluation and options["holdout"]:
            batch = self.dataset.evaluation(options["batch"])
        elif call.evaluation:  # rows of its own, the first of them
            batch = self.dataset.batch(call.seed, 0, options["batch"], shuffle=False)
        else:
            size, shuffle = options["batch"], options["shuffle"]
            batch = self.dataset.batch(call.seed, call.step, size, shuffle, call.stream)
        rows = batch[call.first_row : call.first_row + call.num_rows]
        outputs = {output.port: _column(output, rows) for output in call.node.outputs}
        counts = {name: (float(n), 1.0) for name, n in self._left_out().items() if n}
        numbers = torch.tensor([row.number for row in rows])
        return Result(outputs, counts | _learned(rows), numbers=numbers)

    def _left_out(self) -> dict[str, int]:
        """Rows of the source that are never drawn, by the metric that tells of them."""
        return {
            "dropped_rows": self.dataset.too_long,
            "duplicate_rows": self.dataset.duplicates,
            "set_aside_rows": self.dataset.set_aside,
        }


def open_source(node: Node, tokenizers: Mapping[str, Tokenizer]) -> DataSource:
    """Read, render and tokenise all rows of a `data` node, once.

    Rows with the same prompt, responses and text columns count once. A row whose prompt has more tokens than
    `max_prompt_tokens`, or one of whose responses more than `max_response_tokens`, is left out and counted,
    never cut short.

    Raises:
        HflowError: HF403 naming the row, when a field is missing or a text cannot be tokenised, or when
            there are fewer rows than a batch needs.
    """
    options = node.options
    rows = read_rows(options["dataset"], options["size"], options["options"])
    if chat.is_chat(options):
        examples = _talks(node, rows, tokenizers[options["tokenizer"]])
    else:
        tokenizer = tokenizers[options["tokenizer"]] if options.get("prompt") is not None else None
        examples = _examples(node, rows, tokenizer)
    fitting = [e for e in examples if _fits(e, options)]
    dropped = len(examples) - len(fitting)
    if dropped:
        _LOG.warning("%s: left out %d of %d rows, which are too long", node.name, dropped, len(examples))
    if not fitting:
        raise refused(f"all {len(examples)} rows of `{options['dataset']}` are too long", _limits(options))
    holdout = options["holdout"]
    dataset = hold_out(options["dataset"], fitting, lambda e: e.key, lambda e: e.content, holdout, dropped)
    dataset.require(options["batch"], evaluation_of(node.name))
    return DataSource(dataset)


def _examples(node: Node, rows: Sequence[RowValues], tokenizer: Tokenizer | None) -> list[Example]:
    """`tokenizer`: None for a node without columns of tokens."""
    name, fields = node.options["dataset"], [o.port for o in node.outputs if o.type.dtype == "str"]
    keys = [json.dumps(row, sort_keys=True, default=str) for row in rows]
    prompts: list[list[int]] = [[] for _ in rows]
    responses: list[list[list[int]]] = []
    if tokenizer:
        keys = _render_all(name, "prompt", node.options["prompt"], rows)
        prompts = _encode(name, "prompt", tokenizer, keys)
        texts = {what: _render_all(name, what, t, rows) for what, t in _responses(node.options).items()}
        responses = [_encode(name, what, tokenizer, rendered) for what, rendered in texts.items()]
    numbers, examples = read_numbers(node, rows, _render_all), list[Example]()
    for number, (key, row, prompt) in enumerate(zip(keys, rows, prompts)):
        if tokenizer and not prompt:
            raise refused(f"row {number} of `{name}` has an empty prompt")
        strings = {field: _field(name, number, row, field) for field in fields}
        ended = tuple((*column[number], tokenizer.eos_id) for column in responses) if tokenizer else ()
        examples.append(Example(number, key, tuple(prompt), ended, strings, numbers[number]))
    return examples


def _talks(node: Node, rows: Sequence[RowValues], tokenizer: Tokenizer) -> list[Example]:
    """The rows of a node with conversations."""
    options, name = node.options, node.options["dataset"]
    own = {what: options[what] for what in chat.TEMPLATES if what in options}
    texts = {what: _render_all(name, what, t, rows) for what, t in (own | _responses(options)).items()}
    columns = [o.port for o in node.outputs if o.type.dtype == "str"]
    fields = [{f: _field(name, number, row, f) for f in columns} for number, row in enumerate(rows)]

    def refuse(number: int, problem: ChatProblem) -> HflowError:
        return refused(f"row {number} of `{name}`: {problem.message}", problem.help)

    found = chat_rows(node, rows, texts, tokenizer, refuse)
    numbers = read_numbers(node, rows, _render_all)
    examples = [
        Example(r.number, r.key, r.prompt, r.responses, fields[r.number], numbers[r.number], r.masks)
        for r in found
    ]
    learned, total, _ = _count(examples)
    if learned:
        turns = sum(len(e.responses) for e in examples)
        _LOG.info("%s: %d of %d tokens are learned, in %d responses", node.name, learned, total, turns)
    return examples


def _learned(rows: Sequence[Example]) -> dict[str, tuple[float, float]]:
    """Of conversations with responses: the share of their tokens that are learned."""
    learned, total, marked = _count(rows)
    return {"learned_tokens": (float(learned), float(total))} if marked else {}


def _count(rows: Sequence[Example]) -> tuple[int, int, bool]:
    """Learned tokens, all tokens, and whether the rows say which are learned."""
    learned = sum(sum(mask) for row in rows for mask in row.masks)
    total = sum(len(row.prompt) + len(response) for row in rows for response in row.responses)
    return learned, total, any(row.masks for row in rows)


def _responses(options: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a row's responses, by what to call them."""
    response = options.get("response")
    if isinstance(response, list | tuple):
        return {f"response {number}": template for number, template in enumerate(response)}
    return {} if response is None else {"response": response}


def _render_all(name: str, what: str, template: str, rows: Sequence[RowValues]) -> list[str]:
    compiled = _compile(name, what, template, rows[0])
    return [_render(name, what, number, compiled, row) for number, row in enumerate(rows)]


def _compile(name: str, what: str, template: str, first: RowValues) -> Template:
    try:
        compiled = Template(template)
    except BadTemplateError as error:
        raise refused(f"the {what} template {template!r} is not valid: {error}", error.help) from None
    for field in sorted(compiled.fields - set(first)):
        help_ = did_you_mean(field, first, "fields")
        raise refused(f"rows of `{name}` have no field `{field}`, which the {what} template asks for", help_)
    return compiled


def _render(name: str, what: str, number: int, template: Template, row: RowValues) -> str:
    try:
        return template.render(guarded(row))
    except BadTemplateError as error:
        raise refused(f"row {number} of `{name}`, {what} template: {error}", error.help) from None


def _encode(name: str, what: str, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    try:
        return tokenizer.encode(texts)
    except UnknownTextError as error:
        raise refused(f"row {error.index} of `{name}`, {what}: {error}") from None


def _field(name: str, number: int, row: RowValues, field: str) -> str:
    """The text of a field: numbers as Python writes them, lists and mappings as JSON with sorted keys."""
    if field not in row:
        raise refused(f"row {number} of `{name}` has no field `{field}`", did_you_mean(field, row, "fields"))
    value, problem = row[field], ""
    if isinstance(value, dict | list):
        try:
            return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            problem = f", which JSON cannot write: {error}"
    elif isinstance(value, str | int | float) and not isinstance(value, bool) and not unwritable(value):
        return str(value)
    kind = unwritable(value) or f"no text but {type(value).__name__}{problem}"
    raise refused(f"row {number} of `{name}`: field `{field}` is {kind}")


def _fits(example: Example, options: Mapping[str, Any]) -> bool:
    prompt_fits = len(example.prompt) <= options["max_prompt_tokens"]
    return prompt_fits and all(len(r) <= options["max_response_tokens"] for r in example.responses)


def _limits(options: Mapping[str, Any]) -> str:
    prompt, response = options["max_prompt_tokens"], options["max_response_tokens"]
    return f"max_prompt_tokens is {prompt}, max_response_tokens (with end of sequence) {response}"


def _column(output: Output, rows: Sequence[Example]) -> Rows:
    """The values of one output port; which ones they are is told by its type. Each response has a row."""
    if output.type.dtype == "str":
        return from_strings([row.fields[output.port] for row in rows])
    if output.type.dtype == "f32":
        return Rows(torch.tensor([x for row in rows for x in row.numbers[output.port]], dtype=torch.float32))
    match str(output.type.dims[-1]):
        case "prompt~":
            return from_lists([row.prompt for row in rows])
        case "seq~":
            return from_lists([(*row.prompt, *response) for row in rows for response in row.responses])
        case "resp~":
            masks = [m for row in rows for m in row.masks or [[True] * len(r) for r in row.responses]]
            return from_lists(masks, torch.bool)
    raise AssertionError(f"a data node has no port of type {output.type}")
