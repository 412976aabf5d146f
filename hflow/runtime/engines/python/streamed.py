"""`data` nodes whose rows are streamed: read a block at a time while a run goes on.

The rows that are kept, in file order, are cut into blocks; each is shuffled by a hash of seed, pass and
block, and batches are taken from one block after the other. So the rows of a step follow from the seed and
from the `StreamPosition`, which is state of the run: where reading began, or how much is read ahead, changes
nothing. Of a block that holds the whole file, rows come in the order in which they would without streaming.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from hflow.diagnostics import HflowError
from hflow.graph.ir import Node, evaluation_of
from hflow.graph.row_sources import dataset_name, streaming
from hflow.runtime.data_files import refused
from hflow.runtime.engines.protocol import EngineCall, Result
from hflow.runtime.engines.python.call import run_call
from hflow.runtime.engines.python.data import CheckExamples
from hflow.runtime.engines.python.drawn import drawn
from hflow.runtime.engines.python.examples import Example, fits, tokenised
from hflow.runtime.engines.python.row_texts import RowTexts
from hflow.runtime.permutation import permutation
from hflow.runtime.row_filters import CallFunction, kept_rows
from hflow.runtime.streamed_rows import RowStream, StreamPart, open_stream
from hflow.runtime.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamPosition:
    """How far a stream has been drawn.

    Attributes:
        epoch: the pass over all rows, from 0.
        block: the block of the pass that is drawn from, from 0.
        row: the number of the first row of that block, among all rows whether kept or not.
        taken: rows of the block that were drawn.
        filtered, too_long: rows that were left out in the blocks of the pass before this one.
        size: rows of a block.
    """

    epoch: int = 0
    block: int = 0
    row: int = 0
    taken: int = 0
    filtered: int = 0
    too_long: int = 0
    size: int = 0


@dataclass(frozen=True)
class StreamedRow:
    """What has become of one row: its `examples` that fit; whether it was `filtered`, and how many were
    `too_long`. `number`: among all rows."""

    number: int
    examples: tuple[Example, ...]
    filtered: bool
    too_long: int


@dataclass(frozen=True)
class RowBlock:
    """The examples of the next rows, as many as make a block, or of those that are left. `end`: the number of
    the row after it."""

    examples: tuple[Example, ...]
    end: int
    filtered: int
    too_long: int


@dataclass
class StreamedSource:
    """The rows of one `data` node that streams them.

    Attributes:
        node, tokenizers, call_function: as for `open_source`.
        stream: where rows come from.
        position: of the next row to draw.
    """

    node: Node
    tokenizers: Mapping[str, Tokenizer]
    call_function: CallFunction
    stream: RowStream
    position: StreamPosition
    _rows: Iterator[StreamedRow] | None = None  # those after the block
    _block: RowBlock | None = None  # at the position
    _first: tuple[Example, ...] = ()
    _files: dict[int, str] = field(default_factory=dict[int, str])  # by the numbers of their first rows
    _checks: list[CheckExamples] = field(default_factory=list[CheckExamples])
    _has_warned: bool = False

    def draw(self, call: EngineCall) -> Result:
        """This device's rows of the next batch; of an evaluation, the first rows of all.

        Raises:
            HflowError: HF403 naming the row, when one is wrong, or when there are fewer than a batch needs.
            NodeError: when the function of a filter fails.
        """
        size = call.node.options["batch"]
        if call.evaluation:
            return drawn(call, self.first(size), {})
        batch = self._next(size, call)
        return drawn(call, batch, self._left_out())

    def first(self, count: int) -> tuple[Example, ...]:
        """The first rows, at most so many, in file order; read once."""
        if len(self._first) < count:
            examples = (example for row in self._read_from(0) for example in row.examples)
            self._first = tuple(islice(examples, count))
        return self._first[:count]

    def check(self, check: CheckExamples) -> None:
        """Check the rows of this block, and those of each that comes, once it is read; of an evaluation, the
        rows that it reads."""
        is_evaluated = bool(evaluation_of(self.node.name))
        examples = self.first(self.node.options["batch"]) if is_evaluated else self._present().examples
        check(examples, self._where)
        self._checks.append(check)

    def require(self, size: int, evaluation: str) -> None:
        """Raises HflowError HF403 when a named evaluation needs more rows."""
        have = len(self.first(size))
        if have < size:
            raise refused(f"`{self._name}` has {have} rows, evaluation `{evaluation}` needs {size}")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the next step needs, by names of `hflow.plan.run_state`."""
        yield "position", torch.tensor(astuple(self.position))

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """Set what `tensors` has told. Where blocks had another size, a new one begins with the first row of
        the one that was drawn from.

        Raises:
            HflowError: HF403 as `draw`.
            ValueError: it is of other rows.
        """
        position = kept.get("position")
        numbers = [] if position is None else position.tolist()
        if len(numbers) != len(astuple(self.position)) or min(numbers) < 0:
            raise ValueError(f"the rows of `{self.node.name}` have no such position")
        found, size = StreamPosition(*numbers), self.position.size
        self._go_to(found if found.size == size else replace(found, taken=0, size=size))
        if self.position.taken > len(self._present().examples):
            raise ValueError(f"it has drawn rows of `{self._name}` that are not there")

    @property
    def _name(self) -> str:
        return dataset_name(self.node.options)

    def _next(self, size: int, call: EngineCall) -> list[Example]:
        """The next rows of the pass. As without streaming, a pass ends with its last whole batch."""
        batch: list[Example] = []
        is_from_start = self.position.block == self.position.taken == 0
        while True:
            batch += self._take(size - len(batch), call)
            if len(batch) == size:
                return batch
            if self._has_next_block():
                continue
            if is_from_start:  # all that there is
                raise self._too_few(len(batch), size)
            self._go_to(StreamPosition(self.position.epoch + 1, size=self.position.size))
            batch, is_from_start = [], True

    def _take(self, count: int, call: EngineCall) -> list[Example]:
        """The next rows of this block, at most so many."""
        examples, at = self._present().examples, self.position
        order = range(len(examples))
        if call.node.options["shuffle"]:
            order = permutation(len(examples), call.seed, at.epoch, call.stream, at.block)
        taken = [examples[int(place)] for place in order[at.taken : at.taken + count]]
        self.position = replace(at, taken=at.taken + len(taken))
        return taken

    def _has_next_block(self) -> bool:
        """Go on to the next block; whether it has rows."""
        block, at = self._present(), self.position
        filtered, too_long = at.filtered + block.filtered, at.too_long + block.too_long
        self.position = StreamPosition(at.epoch, at.block + 1, block.end, 0, filtered, too_long, at.size)
        self._block = None
        return bool(self._present().examples)

    def _go_to(self, position: StreamPosition) -> None:
        self.position, self._rows, self._block = position, None, None

    def _present(self) -> RowBlock:
        """The block at the position; it has no rows where the pass ends."""
        if self._block is None:
            self._block = self._read_block()
            for check in self._checks:
                check(self._block.examples, self._where)
        return self._block

    def _read_block(self) -> RowBlock:
        self._rows = self._rows or self._read_from(self.position.row)
        examples: list[Example] = []
        end, filtered, too_long = self.position.row, 0, 0
        for row in self._rows:
            examples += row.examples
            end, filtered, too_long = row.number + 1, filtered + row.filtered, too_long + row.too_long
            if len(examples) >= self.position.size:
                break
        if too_long and not self._has_warned:
            _LOG.warning("%s: leaves out rows that are too long, %d so far", self.node.name, too_long)
            self._has_warned = True
        return RowBlock(tuple(examples), end, filtered, too_long)

    def _read_from(self, first: int) -> Iterator[StreamedRow]:
        """All rows from number `first` on."""
        for part in self.stream.parts(first):
            self._files[part.file_first] = part.rows.names[0]
            yield from self._read_part(part)

    def _read_part(self, part: StreamPart) -> Iterator[StreamedRow]:
        kept = kept_rows(self.node.name, part.rows, self.call_function)
        found: dict[int, list[Example]] = {number: [] for number in kept}
        for example in tokenised(self.node, RowTexts(self._name, part.rows, kept), self.tokenizers):
            found[example.number].append(replace(example, number=part.first + example.number))
        for number in range(len(part.rows.rows)):
            examples = found.get(number, [])
            fitting = tuple(e for e in examples if fits(e, self.node.options))
            too_long = len(examples) - len(fitting)
            yield StreamedRow(part.first + number, fitting, number not in found, too_long)

    def _where(self, number: int) -> str:
        """Row `number` of all, as messages call it: by its place in its own file."""
        firsts = sorted(self._files)
        first = firsts[bisect_right(firsts, number) - 1]
        return f"row {number - first} of `{self._files[first]}`"

    def _left_out(self) -> dict[str, int]:
        """Rows of this pass that are not drawn, up to the end of the block, by the metric that tells of
        them."""
        block, at = self._present(), self.position
        return {
            "dropped_rows": at.too_long + block.too_long,
            "filtered_rows": at.filtered + block.filtered,
        }

    def _too_few(self, have: int, size: int) -> HflowError:
        left_out = self._left_out()
        origin = f"too long: {left_out['dropped_rows']}, filtered: {left_out['filtered_rows']}"
        return refused(f"`{self._name}` has {have} rows to train on ({origin}), a batch needs {size}")


def open_streamed(
    node: Node, tokenizers: Mapping[str, Tokenizer], call_function: CallFunction = run_call
) -> StreamedSource:
    """The rows of a `data` node that streams them. The first ones are read, so that bad data are told before
    the first step.

    Raises:
        HflowError: HF403 when a file cannot be read, has no rows, or one of the first is wrong.
        NodeError: when the function of a filter fails.
    """
    streamed = streaming(node.options)
    assert streamed
    stream = open_stream(node.options)
    source = StreamedSource(node, tokenizers, call_function, stream, StreamPosition(size=streamed.block))
    if evaluation_of(node.name):
        source.require(node.options["batch"], evaluation_of(node.name))
    return source
