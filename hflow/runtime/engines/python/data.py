"""`data` nodes that hold all rows of their dataset: read, filtered, rendered and tokenised once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hflow.graph.ir import Node, evaluation_of
from hflow.graph.row_sources import curriculum, dataset_name, is_mixture, success_curriculum
from hflow.runtime.data_files import refused
from hflow.runtime.datasets import Dataset, hold_out
from hflow.runtime.engines.protocol import EngineCall, Result
from hflow.runtime.engines.python.call import run_call
from hflow.runtime.engines.python.drawn import drawn, learned_tokens
from hflow.runtime.engines.python.examples import Example, fits, lengths_text, tokenised
from hflow.runtime.engines.python.row_texts import RowTexts
from hflow.runtime.row_filters import CallFunction, difficulties, kept_rows
from hflow.runtime.row_order import RowOrder, groups_of
from hflow.runtime.source_rows import SourceRows, read_sources
from hflow.runtime.success_rates import SuccessRates
from hflow.runtime.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
# Raises HflowError where rows cannot be used; given a function that says where the row of a number is.
CheckExamples = Callable[[Sequence[Example], Callable[[int], str]], None]


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
        result = drawn(call, batch, self._left_out() | self._of_sources(batch))
        return replace(result, metrics={**result.metrics, **_of_rates(rates, call)})

    def first(self, count: int) -> tuple[Example, ...]:
        """The first rows to train on, at most so many, in file order."""
        return self.dataset.train[:count]

    def check(self, check: CheckExamples) -> None:
        """Check all rows."""
        check((*self.dataset.train, *self.dataset.held_out), self.where)

    def require(self, size: int, evaluation: str) -> None:
        """Raises HflowError HF403 when a named evaluation needs more rows."""
        self.dataset.require(size, evaluation)

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
    examples = tokenised(node, RowTexts(name, found, kept), tokenizers)
    _tell_learned(node, examples)
    fitting = [e for e in examples if fits(e, options)]
    dropped = len(examples) - len(fitting)
    if dropped:
        told = dropped, len(examples), lengths_text(examples, options)
        _LOG.warning("%s: left out %d of %d rows, which are too long: %s", node.name, *told)
    if not fitting:
        raise refused(f"all {len(examples)} rows of `{name}` are too long", lengths_text(examples, options))
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


def _tell_learned(node: Node, examples: Sequence[Example]) -> None:
    learned, total, is_marked = learned_tokens(examples)
    if is_marked and learned:
        turns = sum(len(e.responses) for e in examples)
        _LOG.info("%s: %d of %d tokens are learned, in %d responses", node.name, learned, total, turns)


def _of_rates(rates: SuccessRates | None, call: EngineCall) -> dict[str, tuple[float, float]]:
    """Of a curriculum by success: how many rows were tried so far, and the mean estimate of this device's
    rows."""
    if rates is None or call.evaluation:
        return {}
    drawn_here = rates.drawn[-1][call.first_row : call.first_row + call.num_rows]
    expected = float(rates.estimates()[drawn_here].sum()), float(len(drawn_here))
    return {"tried_rows": (float((rates.tries > 0).sum()), 1.0), "expected_success": expected}
