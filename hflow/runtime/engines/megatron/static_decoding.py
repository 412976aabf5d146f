"""Token after token by a CUDA graph.

A decoding step is hundreds of short kernels, each of which takes a CPU longer to launch than it takes to run.
Here a step reads and writes tensors that stay where they are and asks the device nothing, so that it is
captured once and replayed with one launch. A graph holds for a number of rows, and of places that attention
looks at. Rows that have ended stay in the batch, and what they draw is ignored, until few others are left, a
graph is captured anyway, or it is seen that all have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from hflow.runtime.engines.megatron.cache import KeyValueCache
from hflow.runtime.engines.megatron.decoder import Decoder
from hflow.runtime.engines.megatron.responses import Responses
from hflow.runtime.engines.megatron.shaped_config import shape_of_model
from hflow.runtime.engines.megatron.sight import StaticSight
from hflow.runtime.engines.sampler import NotFinite, Sampling
from hflow.runtime.sampling import sample, uniform
from hflow.runtime.truncation import truncate

PLATFORMS = ("cuda",)  # where launching kernels takes longer than running them
STRETCH = 256  # places by which what attention looks at grows
FEW = 0.25  # of a batch's rows: with so many that go on it is made smaller
WORTH = 3  # tokens: for fewer no graph is captured (estimated)
LOOK = 8  # tokens between two looks at which rows go on: the device does not wait meanwhile


def is_static(model: GPTModel, sampling: Sampling) -> bool:
    """Whether steps of this model and sampling are to be captured. Not where shapes change: experts get as
    many tokens as routers choose, and sets of kept tokens have any size. Collectives have not been tried."""
    collection: Any = model.pg_collection
    platform = next(model.parameters()).device.type
    changing = shape_of_model(model).moe or sampling.max_kept or sampling.routes
    return platform in PLATFORMS and not changing and collection.tp.size() == 1


def decode(
    decoder: Decoder,
    cache: KeyValueCache,
    logits: Tensor,
    present: Tensor,
    ids: Tensor,
    sampling: Sampling,
    out: Responses,
) -> None:
    """Draw from `logits` and go on until all rows have ended or are as long as they may be.

    Args:
        cache: that of the prompts, with a row for each response; it is used up.
        logits: after the prompts, ``[rows, vocab]``.
        present: bool ``[rows, prompt tokens]``, False where there is padding.
        ids: as of `generate`.
        out: of no tokens yet; filled in.

    Raises:
        NotFinite: a logit is not.
    """
    cache.clear_rest()
    step = StaticStep(decoder, cache, present, ids, sampling, out)
    step.draw(logits)
    graphs, replay = Graphs(), step
    look, going = 1 if sampling.ends.texts else LOOK, len(ids)
    for drawn in range(1, sampling.max_new_tokens):
        outgrown = cache.used >= step.places
        if outgrown or drawn % look == 0:
            going = step.going_after(drawn)
        if not going:
            return
        if outgrown or going <= FEW * len(step.ids):
            step.settle()
            step()  # which also lets libraries prepare what may not be prepared in a capture
            left = min(step.places - cache.used, sampling.max_new_tokens - drawn) - 1
            replay = graphs.captured(step) if left > WORTH else step
        else:
            replay()
        cache.advance(1)
    step.going_after(sampling.max_new_tokens)


class StaticStep:
    """Reads the newest token of each row and draws the next one.

    Attributes:
        rows: int64 ``[rows]``, of `out`; ids: as of `generate`; tokens: the newest, int64; going: bool, which
            rows have not ended.
        number: int64 ``[1]``, of the token that is drawn next, from 0 on.
        at: int64 ``[1]``, the place of the token that is read.
        present: bool ``[rows, length]``, which places a token sees that has all before it.
        places: how many of these are looked at; 0: `settle` has yet to tell.
        faults: int64 ``[rows]``: the number of the first token before which a logit was not finite, or -1.
        told: int64 ``[2]``: whether any was not, and how many rows go on.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KeyValueCache,
        present: Tensor,
        ids: Tensor,
        sampling: Sampling,
        out: Responses,
    ):
        self.decoder, self.cache, self.sampling, self.out, self.ids = decoder, cache, sampling, out, ids
        self.rows, self.tokens = torch.arange(len(ids), device=ids.device), torch.zeros_like(ids)
        self.going = torch.ones_like(ids, dtype=torch.bool)
        self.number, self.told, self.faults = ids.new_zeros(1), ids.new_zeros(2), torch.full_like(ids, -1)
        self.at = torch.full_like(self.number, cache.used)
        self.present = present.new_zeros(len(ids), decoder.length)
        self.present[:, : present.shape[1]] = present
        self.places = 0

    def settle(self) -> None:
        """Drop rows that have ended, and look at some more places than are taken."""
        if not bool(self.going.all()):
            kept = self.cache.keep(self.going.nonzero().squeeze(1))
            self.rows, self.ids, self.tokens = self.rows[kept], self.ids[kept], self.tokens[kept]
            self.going, self.present, self.faults = self.going[kept], self.present[kept], self.faults[kept]
        self.places = min(self.decoder.length, (self.cache.used // STRETCH + 1) * STRETCH)

    def __call__(self) -> None:
        self.present.index_fill_(1, self.at, True)
        sight = StaticSight.of(self.at, self.present[:, : self.places], self.decoder.windows)
        self.draw(self.decoder.newest(self.tokens, sight, self.cache))
        self.at.add_(1)

    def draw(self, logits: Tensor) -> None:
        """The next token of each row from its `logits`, ``[rows, vocab]``."""
        of, out, broken = self.sampling, self.out, ~logits.isfinite().all(-1)
        fault = self.going & (self.faults < 0) & broken
        self.faults.copy_(self.number.where(fault, self.faults))
        # Of NaN a token outside the vocabulary might be drawn, also in a row that has ended.
        logits.masked_fill_(broken[:, None], 0.0)
        if of.truncation:
            truncate(logits, of.temperature, of.truncation)
        u = uniform(of.seed, of.step, self.ids, self.number, of.stream)
        tokens, log_probs = sample(logits, u, of.temperature)
        at = self.rows, self.number.expand_as(self.rows)
        out.tokens.index_put_(at, tokens)
        out.log_probs.index_put_(at, log_probs)
        self.tokens.copy_(tokens)
        self.number.add_(1)
        self._end(self.going & of.ends.goes_on(tokens))
        self.told.copy_(torch.stack([(self.faults >= 0).any(), self.going.sum()]))

    def going_after(self, drawn: int) -> int:
        """How many rows go on after so many tokens, which have been drawn.

        Raises:
            NotFinite: a logit was not.
        """
        faulty, going = self.told.tolist()
        if faulty:
            row = int((self.faults >= 0).nonzero()[0])
            where = f"response token {int(self.faults[row])} of row {int(self.ids[row])}"
            raise NotFinite(f"a logit before {where} is not finite")
        if not self.sampling.ends.texts:
            return going
        first = max(0, drawn - self.sampling.ends.window)
        self._end(self.going & self.sampling.ends.going(self.out.tokens[self.rows, first:drawn]))
        return int(self.going.sum())

    def _end(self, going: Tensor) -> None:
        """Rows that are not `going` any more have as many tokens as were drawn."""
        lengths = self.out.lengths[self.rows]
        ended = self.number.where(self.going & ~going, lengths)
        self.out.lengths.index_put_((self.rows,), ended)
        self.going.copy_(going)


class Graphs:
    """Captures steps of one decoding. Graphs share a pool of memory as long as one of them is there, so the
    last one stays until the next is made."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._last: torch.cuda.CUDAGraph | None = None

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """What does the same as `step`, which runs on CUDA, with one launch."""
        if self._last is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            self._last = self._graph(step)
        except torch.OutOfMemoryError:
            # Memory that is reserved and not used is given back outside captures only.
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()
            self._last = self._graph(step)
        return self._last.replay

    def _graph(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # `torch.cuda.graph` collects garbage and gives free memory back, which takes longer than this
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all captures: memory is shared by those on the same stream only."""
    return torch.cuda.Stream()
