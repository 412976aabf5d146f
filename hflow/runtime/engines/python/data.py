"""`data` nodes: rows of a dataset as prompt tokens, prompt-response tokens, masks and strings."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as default
from typing import Any

import numpy as np
import torch

from hflow.diagnostics import HflowError
from hflow.graph.infer.kinds import chat
from hflow.graph.ir import Node, Output, evaluation_of
from hflow.graph.row_sources import curriculum, dataset_name, is_mixture, success_curriculum
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.rows import chat_rows
from hflow.runtime.data_files import refused
from hflow.runtime.datasets import Dataset, hold_out
from hflow.runtime.engines.protocol import EngineCall, Result
from hflow.runtime.engines.python.call import run_call
from hflow.runtime.engines.python.number_columns import read_numbers
from hflow.runtime.engines.python.row_texts import RowTexts
from hflow.runtime.row_filters import CallFunction, difficulties, kept_rows
from hflow.runtime.row_order import RowOrder, groups_of
from hflow.runtime.rows import Rows, from_lists, from_strings
from hflow.runtime.source_rows import SourceRows, read_sources
from hflow.runtime.success_rates import SuccessRates
from hflow.runtime.text_field import text_of
from hflow.runtime.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class DataSource:
    """The tokenised rows of one `data` node; `where` says where the row of a number is, for messages."""

    dataset: Dataset[Example]
    where: Callable[[int], str]

    def draw(self, call: EngineCall, rates: SuccessRates | None = None) -> Result:
        """This device's rows of the batch of `call.step`, or of the held-out rows.

        Args:
            rates: of a curriculum by success; they remember the batch.

        Raises:
            HflowError: HF403 when there are fewer rows than a batch needs.
        """
        options = call.node.options
        if call.evaluation and options["holdout"]:
            batch = self.dataset.evaluation(options["batch"])
        elif call.evaluation:  # rows of its own, the first of them
            batch = self.dataset.batch(call.seed, 0, options["batch"], shuffle=False)
        else:
            batch = self._batch(call, rates)
        rows = batch[call.first_row : call.first_row + call.num_rows]
        outputs = {output.port: _column(output, rows) for output in call.node.outputs}
        told = {name: n for name, n in self._left_out().items() if n} | self._of_sources(batch)
        counts = {name: (float(n), 1.0) for name, n in told.items()} | _of_rates(rates, call)
        numbers = torch.tensor([row.number for row in rows])
        return Result(outputs, counts | _learned(rows), numbers=numbers)

    def _batch(self, call: EngineCall, rates: SuccessRates | None) -> tuple[Example, ...]:
        """All rows of the batch of a step."""
        size, shuffle = call.node.options["batch"], call.node.options["shuffle"]
        if rates is None:
            return self.dataset.batch(call.seed, call.step, size, shuffle, call.stream)
        self.dataset.require(size)
        assert self.dataset.order
        places = self.dataset.order.batch(call.seed, call.step, size, True, call.stream, rates.weights())
        rates.drawn.append(np.array(places, np.int64))
        return tuple(self.dataset.train[place] for place in places)

    def _of_sources(self, batch: Sequence[Example]) -> dict[str, int]:
        """How many rows of a batch are from each source of a mixture."""
        groups = self.dataset.order.groups if self.dataset.order else ()
        counts = Counter(example.source for example in batch)
        return {f"rows.{g.name}": counts[i] for i, g in enumerate(groups)} if len(groups) > 1 else {}

    def _left_out(self) -> dict[str, int]:
        """Rows of the source that are never drawn, by the metric that tells of them."""
        return {
            "dropped_rows": self.dataset.too_long,
            "filtered_rows": self.dataset.filtered,
            "duplicate_rows": self.dataset.duplicates,
            "set_aside_rows": self.dataset.set_aside,
        }


def open_source(
    node: Node, tokenizers: Mapping[str, Tokenizer], call_function: CallFunction = run_call
) -> DataSource:
    """Read, filter, render and tokenise all rows of a `data` node, once.

    Rows with the same prompt, responses and text columns count once. A row whose prompt has more tokens than
    `max_prompt_tokens`, or one of whose responses more than `max_response_tokens`, is left out and counted,
    never cut short.

    Args:
        call_function: runs the functions of filters.

    Raises:
        HflowError: HF403 naming the row, when a field is missing or a text cannot be tokenised, or when
            there are fewer rows than a batch needs.
        NodeError: when the function of a filter fails.
    """
    options = node.options
    found = read_sources(options)
    name = dataset_name(options)
    kept = kept_rows(node.name, found, call_function)
    filtered = len(found.rows) - len(kept)
    if not kept:
        raise refused(f"the filter leaves none of the {filtered} rows of `{name}`")
    texts = RowTexts(name, found, kept)
    if chat.is_chat(options):
        examples = _talks(node, texts, tokenizers[options["tokenizer"]])
    else:
        tokenizer = tokenizers[options["tokenizer"]] if options.get("prompt") is not None else None
        examples = _examples(node, texts, tokenizer)
    fitting = [e for e in examples if _fits(e, options)]
    dropped = len(examples) - len(fitting)
    if dropped:
        _LOG.warning("%s: left out %d of %d rows, which are too long", node.name, dropped, len(examples))
    if not fitting:
        raise refused(f"all {len(examples)} rows of `{name}` are too long", _limits(options))
    holdout = options["holdout"]
    dataset = hold_out(name, fitting, lambda e: e.key, lambda e: e.content, holdout, dropped, filtered)
    dataset = replace(dataset, order=_order(options, found, dataset.train))
    dataset.require(options["batch"], evaluation_of(node.name))
    return DataSource(dataset, found.where)


def _order(options: Mapping[str, Any], found: SourceRows, rows: Sequence[Example]) -> RowOrder | None:
    """The order of a mixture or a curriculum; None for the usual one."""
    hardness = curriculum(options)
    if hardness is None and not is_mixture(options) and not success_curriculum(options):
        return None
    names, weights = [s.name for s in found.sources], [s.weight for s in found.sources]
    difficulty = difficulties(hardness.by, found, [e.number for e in rows]) if hardness else None
    return RowOrder(groups_of(names, weights, [e.source for e in rows], difficulty), hardness)


def _examples(node: Node, texts: RowTexts, tokenizer: Tokenizer | None) -> list[Example]:
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


def _talks(node: Node, texts: RowTexts, tokenizer: Tokenizer) -> list[Example]:
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
    learned, total, _ = _count(examples)
    if learned:
        turns = sum(len(e.responses) for e in examples)
        _LOG.info("%s: %d of %d tokens are learned, in %d responses", node.name, learned, total, turns)
    return examples


def _of_rates(rates: SuccessRates | None, call: EngineCall) -> dict[str, tuple[float, float]]:
    """Of a curriculum by success: how many rows were tried so far, and the mean estimate of this device's
    rows."""
    if rates is None or call.evaluation:
        return {}
    drawn = rates.drawn[-1][call.first_row : call.first_row + call.num_rows]
    expected = float(rates.estimates()[drawn].sum()), float(len(drawn))
    return {"tried_rows": (float((rates.tries > 0).sum()), 1.0), "expected_success": expected}


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
