"""Generate nodes: the first turn of a conversation, or one more.

A later turn takes over what earlier ones made. Each row gets its observation (what a tool or an
environment answered), which no model sampled and none learns from: mask False, log-prob 0. Then the
model goes on. A row without an observation is finished and stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from hflow.graph.infer.kinds.generate import LENGTH, ROUTES, VERSIONS
from hflow.graph.types import Truncation
from hflow.plan.layout import Range
from hflow.runtime.chat.observations import observations, observed
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.ends import EndRule
from hflow.runtime.engines.ended import Ended, masked
from hflow.runtime.engines.protocol import EngineCall, MetricSums, NodeError, Result
from hflow.runtime.engines.sampler import Answers, NotFinite, Sampler, Sampling
from hflow.runtime.rows import Rows, from_lists, from_strings, joined
from hflow.runtime.tokenizer import Tokenizer, UnknownTextError


@dataclass(frozen=True)
class Rollout:
    """One execution of a generate node on this rank's rows.

    `max_positions`: the longest sequence that the model can read. `dp`, `tp`: the rank's numbers in its mesh.
    """

    call: EngineCall
    sampler: Sampler
    max_positions: int
    tokenizer: Tokenizer
    dp: int
    tp: int

    def begin(self, inputs: Mapping[str, Rows]) -> Callable[[], Result]:
        """Answer `prompt`, or go on with `tokens`, `mask` and `logprobs` after `observation`. Gives what
        waits for the result.

        Raises:
            NodeError: a prompt is empty, an observation cannot be tokenised, or a row becomes longer than
                the model's positions; from what waits, HF405 where an answer has a number that is not finite.
        """
        return self._first(inputs["prompt"]) if "prompt" in inputs else self._further(inputs)

    def _first(self, prompts: Rows) -> Callable[[], Result]:
        if len(prompts) and int(prompts.row_lengths.min()) == 0:
            raise self._refused("a prompt is empty")
        first, end = self._made
        rows = torch.arange(end - first)
        sampling = self._sample(prompts, rows + first)
        asked = rows * len(prompts) // max(1, len(rows))

        def result() -> Result:
            answers = sampling()
            tokens = joined(prompts.take(asked), answers.tokens)
            ended = Ended.of(answers, self._ends, self.call.node)
            mask = masked(_filled(answers.tokens, True), ended.dropped)
            made = self._result(tokens, answers.log_probs, mask, ended, self._finished(answers.tokens, 0))
            made = self._with_routes(self._with_versions(made, answers), answers)
            return replace(made, end_s=answers.end_s)

        return result

    def _further(self, inputs: Mapping[str, Rows]) -> Callable[[], Result]:
        texts = inputs["observation"].strings()
        going = torch.tensor([i for i, text in enumerate(texts) if text], dtype=torch.int64)
        observed, cut = self._observed(texts, inputs["tokens"])
        before = joined(inputs["tokens"], observed)
        sampling = self._sample(before.take(going), going + self.call.first_row)

        def result() -> Result:
            found = sampling()
            answers = Answers(
                _spread(found.tokens, going, len(texts)), _spread(found.log_probs, going, len(texts))
            )
            tokens = joined(before, answers.tokens)
            ended = Ended.of(found, self._ends, self.call.node).after(inputs, observed, going, answers.tokens)
            mask = joined(inputs["mask"], _filled(observed, False), _filled(answers.tokens, True))
            mask = masked(mask, ended.dropped)
            log_probs = joined(inputs["logprobs"], _filled(observed, 0.0), answers.log_probs)
            # A count over all rows: the weights of the data-parallel ranks add up to 1.
            metrics = {"cut_observations": (float(cut), float(self.dp == 0))}
            metrics |= self._finished(answers.tokens, len(texts) - len(going))
            return self._result(tokens, log_probs, mask, ended, metrics)

        return result

    def _observed(self, texts: list[str], before: Rows) -> tuple[Rows, int]:
        """The observations' tokens, none for a finished row, and how many were cut short."""
        limit = self.call.node.options["max_observation_tokens"]
        written = observations(self.call.node.options, self.tokenizer)
        try:
            if written:
                rows, cut = observed(written, texts, _lasts(before), limit)
                return from_lists(rows), cut
            encoded = self.tokenizer.encode(texts)
        except UnknownTextError as error:
            row = self.call.first_row + error.index
            raise self._refused(f"observation of row {row}: {error}") from None
        except ChatProblem as error:
            raise self._refused(error.message) from None
        return from_lists([row[:limit] for row in encoded]), sum(len(row) > limit for row in encoded)

    def _sample(self, prompts: Rows, ids: torch.Tensor) -> Callable[[], Answers]:
        """Answers of the rows with global numbers `ids`, ``len(ids) / len(prompts)`` to each prompt."""
        options = self.call.node.options
        sampling = Sampling(
            max_new_tokens=options["max_new_tokens"],
            temperature=options["temperature"],
            seed=self.call.seed,
            step=self.call.step,
            stream=self.call.stream,
            ends=self._ends,
            truncation=Truncation.of(options),
            max_kept=options.get("max_kept"),
            routes=self.call.node.output(ROUTES) is not None,
        )
        self._check_length(prompts, sampling.max_new_tokens)
        waiting = self.sampler(prompts, ids, sampling)

        def answers() -> Answers:
            try:
                return waiting()
            except NotFinite as problem:
                raise NodeError(self.call.node.name, f"{self.call.when}: {problem}", "HF405") from None

        return answers

    @property
    def _made(self) -> Range:
        """The global numbers of the rows that it makes here."""
        first, samples = self.call.first_row, self.call.node.options.get("n", 1)
        return self.call.made or (first * samples, (first + self.call.num_rows) * samples)

    @cached_property
    def _ends(self) -> EndRule:
        return EndRule.of(self.call.node.options, self.tokenizer.eos_id, self.tokenizer.decode)

    def _check_length(self, prompts: Rows, new: int) -> None:
        needed = int(prompts.row_lengths.max()) + new if len(prompts) else 0
        if needed > self.max_positions:
            problem = f"prompt and response need {needed} positions, the model has {self.max_positions}"
            raise self._refused(problem)

    def _with_versions(self, result: Result, answers: Answers) -> Result:
        """Metric `renewed_tokens`: the share that weights sampled which came in flight."""
        if not self.call.node.output(VERSIONS):
            return result
        assert answers.versions is not None, f"{self.call.node.name}: its engine tells no versions"
        versions = answers.versions.values
        renewed = float((versions > answers.begun).sum()), float(len(versions))
        metrics = {**result.metrics, "renewed_tokens": renewed} if result.metrics else {}
        return replace(result, outputs={**result.outputs, VERSIONS: answers.versions}, metrics=metrics)

    def _with_routes(self, result: Result, answers: Answers) -> Result:
        if not self.call.node.output(ROUTES):
            return result
        assert answers.routes is not None, f"{self.call.node.name}: its engine tells no routes"
        return replace(result, outputs={**result.outputs, ROUTES: answers.routes})

    def _result(self, tokens: Rows, log_probs: Rows, mask: Rows, ended: Ended, metrics: MetricSums) -> Result:
        outputs = {"tokens": tokens, "logprobs": log_probs, "mask": mask, **ended.outputs(self.call.node)}
        if self.call.node.output("text"):
            outputs["text"] = from_strings(self.tokenizer.decode(_tails(tokens, mask.row_lengths)))
        if self.tp > 0:
            return Result(outputs)
        length = {"response_length": (float(mask.row_lengths.sum()), float(len(mask)))}
        # Counts over all rows: the weights of the data-parallel ranks add up to 1.
        dropped = {name: (float(count), float(self.dp == 0)) for name, count in ended.counts.items()}
        return Result(outputs, length | dropped | metrics, digest(tokens, self._made[0]))

    def _finished(self, answers: Rows, before: int) -> MetricSums:
        """In an evaluation, the share of the conversations whose last response did not end by its greatest
        length. `before`: how many of the rows, which went no further, had ended already."""
        if not self.call.evaluation:
            return {}
        ends = self._ends.now([response for response in answers.lists() if response])
        ended = sum(end != LENGTH for end in ends) + before
        return {"finished": (float(ended), float(len(answers)))}

    def _refused(self, problem: str) -> NodeError:
        return NodeError(self.call.node.name, problem)


def _filled(rows: Rows, value: bool | float) -> Rows:
    """The same value for every element of ragged rows."""
    return Rows(torch.full((len(rows.values),), value), rows.lengths)


def _spread(rows: Rows, places: torch.Tensor, total: int) -> Rows:
    """`total` ragged rows: the given ones at ascending `places`, empty ones elsewhere."""
    lengths = torch.zeros(total, dtype=torch.int64).index_copy_(0, places, rows.row_lengths)
    return Rows(rows.values, lengths)


def _lasts(tokens: Rows) -> list[int | None]:
    """The last token of every row, None of an empty one."""
    return [row[-1] if row else None for row in tokens.lists()]


def _tails(tokens: Rows, lengths: torch.Tensor) -> list[list[int]]:
    """The last so many tokens of every row."""
    return [row[len(row) - length :] for row, length in zip(tokens.lists(), lengths.tolist())]


def digest(tokens: Rows, first_row: int) -> int:
    """Sum modulo 2^64 over rows of the 64-bit BLAKE2b of (int64 global row number, int32 tokens).

    A sum, so that parts on different devices add up to the same number however the rows are split.
    """
    ends = np.concatenate([[0], tokens.row_lengths.cumsum(0).numpy()])
    data = tokens.values.numpy().astype("<i4").tobytes()
    total = 0
    for row, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist())):
        text = (first_row + row).to_bytes(8, "little") + data[4 * start : 4 * end]
        total += int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return total % 2**64
