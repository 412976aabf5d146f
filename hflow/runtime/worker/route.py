"""What one rank sends, receives, reads and keeps when the weights of a lowered edge move.

Worked out once from the plan's copies; a step only walks it. Between ranks of which one can read the other's
memory, all copies are one read. Otherwise every copy is a message of its own, so that it can go straight from
storage to storage; small ones between the same ranks share one. Both ends of a message cut and order their
messages by the same rule, from the copies between them alone. The order is the same on all ranks, so whoever
takes its messages in this order, round by round, waits for nobody who waits for it.

Engines interleave queries, keys and values by query group; so these are cut into groups, which lie together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from hflow.plan.edges import Copy, CopySet
from hflow.plan.layout import Box, intersect, volume
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import parameters
from hflow.runtime.engines.protocol import Weights

SMALL_ELEMENTS = 2**14  # up to here, a message costs more than its bytes
ROUND_ELEMENTS = 2**22

ParameterPart = tuple[str, Box]  # of a parameter


@dataclass(frozen=True)
class Message:
    """Parts that go from `source` to `target` at once."""

    source: int
    target: int
    parts: tuple[ParameterPart, ...]

    @cached_property
    def size(self) -> int:
        """Elements."""
        return sum(volume(box) for _, box in self.parts)


@dataclass(frozen=True)
class Round:
    """Messages that are under way at the same time, in the order that all ranks share."""

    messages: tuple[Message, ...]

    @cached_property
    def size(self) -> int:
        """Elements."""
        return sum(m.size for m in self.messages)


@dataclass(frozen=True)
class Phase:
    """`reads`: targets copy them out of the sources' memory. In a `relay` all comes from weights that an
    earlier phase brought."""

    reads: tuple[Message, ...]
    rounds: tuple[Round, ...]
    relay: bool

    def messages(self) -> Iterator[Message]:
        yield from self.reads
        for round_ in self.rounds:
            yield from round_.messages


@dataclass(frozen=True)
class Route:
    """`own`: what this rank holds already and keeps."""

    rank: int
    own: tuple[ParameterPart, ...]
    phases: tuple[Phase, ...]

    @cached_property
    def received(self) -> int:
        """Elements."""
        return sum(m.size for p in self.phases for m in p.messages() if m.target == self.rank)

    @cached_property
    def staging(self) -> int:
        """Elements that may have to be copied on their way at once: of a round, or of a part that is read."""
        rounds = [round_.size for phase in self.phases for round_ in phase.rounds]
        parts = [volume(box) for phase in self.phases for m in phase.reads for _, box in m.parts]
        return max([0, *rounds, *parts])


def make_route(
    sets: Sequence[CopySet],
    shape: ModelShape,
    source: Weights | None,
    target: Weights | None,
    rank: int,
    names: Collection[str] | None = None,
    readable: Set[tuple[int, int]] = frozenset(),
) -> Route:
    """The part of `rank` in lowered copies.

    Args:
        source, target: what it holds, and what is to be written, if anything.
        names: of the parameters that move; None for all.
        readable: pairs of a rank and another whose memory it can read.
    """
    chosen = (
        frozenset(parameter.name for parameter in parameters(shape)) if names is None else frozenset(names)
    )
    phases: dict[int, list[tuple[str, Copy]]] = defaultdict(list)
    for copy_set in sets:
        mine = [copy for copy in copy_set.copies if rank in (copy.source, copy.target)]
        for name in filter(chosen.__contains__, copy_set.tensors if mine else ()):
            unit = _group_rows(shape, name)  # a set has all tensors of a shape, whatever they are
            for copy in (c for whole in mine for c in _cut(whole, unit)):
                phases[copy.phase].append((name, copy))
    found = [_phase(phases[number], number > 0, readable) for number in sorted(phases)]
    own = _own(source, target, chosen) if source and target else ()
    return Route(rank, tuple(own), tuple(found))


def _phase(copies: Sequence[tuple[str, Copy]], relay: bool, readable: Set[tuple[int, int]]) -> Phase:
    sent = [(name, c) for name, c in copies if (c.target, c.source) not in readable]
    read = [(name, c) for name, c in copies if (c.target, c.source) in readable]
    reads: dict[tuple[int, int], list[ParameterPart]] = defaultdict(list)
    for name, copy in read:
        reads[copy.source, copy.target].append((name, copy.box))
    rounds = map(Round, _rounds([*_packed(sent), *_single(sent)]))
    return Phase(tuple(Message(*pair, tuple(reads[pair])) for pair in sorted(reads)), tuple(rounds), relay)


def _group_rows(shape: ModelShape, name: str) -> int:
    """Rows of a query group in a parameter; 0 for one that is not cut."""
    module = name.split(".")[-2]
    if module == "q_proj":
        return shape.num_heads // shape.num_kv_heads * shape.head_dim
    return shape.head_dim if module in ("k_proj", "v_proj") else 0


def _cut(copy: Copy, unit: int) -> Iterator[Copy]:
    """The copy, cut at multiples of `unit` rows."""
    (first, last), *columns = copy.box
    if not unit:
        yield copy
        return
    for start in range(first // unit * unit, last, unit):
        yield replace(copy, box=((max(first, start), min(last, start + unit)), *columns))


def _own(source: Weights, target: Weights, chosen: Set[str]) -> Iterator[ParameterPart]:
    held = set(source.names())
    for name in filter(chosen.__contains__, target.names()):
        box = intersect(source.box(name), target.box(name)) if name in held else None
        if box:
            yield name, box


def _is_small(copy: Copy) -> bool:
    return volume(copy.box) <= SMALL_ELEMENTS


def _single(copies: Iterable[tuple[str, Copy]]) -> list[Message]:
    return [Message(c.source, c.target, ((name, c.box),)) for name, c in copies if not _is_small(c)]


def _packed(copies: Iterable[tuple[str, Copy]]) -> list[Message]:
    """The small copies: each pair's first messages, then each pair's second, and so on."""
    packs: dict[tuple[int, int], list[list[ParameterPart]]] = defaultdict(list)
    room: dict[tuple[int, int], int] = defaultdict(int)
    for name, copy in copies:
        if not _is_small(copy):
            continue
        pair = copy.source, copy.target
        if room[pair] < volume(copy.box):
            packs[pair].append([])
            room[pair] = ROUND_ELEMENTS
        packs[pair][-1].append((name, copy.box))
        room[pair] -= volume(copy.box)
    numbered = [(number, pair, parts) for pair, all_ in packs.items() for number, parts in enumerate(all_)]
    return [Message(*pair, tuple(parts)) for _, pair, parts in sorted(numbered)]


def _rounds(messages: Iterable[Message]) -> Iterator[tuple[Message, ...]]:
    """Cut so that a round has no more elements than ROUND_ELEMENTS, or one message."""
    taken: list[Message] = []
    size = 0
    for message in messages:
        if taken and size + message.size > ROUND_ELEMENTS:
            yield tuple(taken)
            taken, size = [], 0
        taken.append(message)
        size += message.size
    if taken:
        yield tuple(taken)
