"""Put a program's instructions into the order in which the workers walk through them.

That of `list_scheduling.arrange`, but a node's onload, call and offload stay together; a copy of weights that
lasts for this step only comes directly before its first reader, so that others can have the memory; and what
only keeps or drops comes as soon as it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hflow.graph.ir import Graph
from hflow.plan.program import (
    Free,
    Instruction,
    Loop,
    Offload,
    Onload,
    Program,
    Release,
    SyncWeights,
    Timeless,
    handles_read,
    handles_written,
)
from hflow.schedule.list_scheduling import Task, arrange
from hflow.schedule.tasks import tasks
from hflow.schedule.timed_span import loop_time_s

Block = tuple[int, ...]  # positions of instructions that run one directly after the other


def arranged(program: Program) -> Program:
    """The program in the order of list scheduling, bodies of loops too, with frees and the loops' times."""
    return replace(program, instructions=_arranged(program.graph, program.instructions))


def _arranged(graph: Graph, instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    timed = [_with_rounds(graph, i) if isinstance(i, Loop) else i for i in instructions]
    blocks = list(_blocks(timed))
    return _with_frees(timed, _eager_first(timed, blocks, _order(timed, blocks)))


def _with_rounds(graph: Graph, loop: Loop) -> Loop:
    loop = replace(loop, body=_arranged(graph, loop.body))
    return replace(loop, time_s=loop_time_s(graph, loop))


def _blocks(instructions: Sequence[Instruction]) -> Iterator[Block]:
    start = 0
    for position, instruction in enumerate(instructions):
        following = instructions[position + 1 : position + 2]
        if not isinstance(instruction, Onload) and not any(isinstance(i, Offload) for i in following):
            yield tuple(range(start, position + 1))
            start = position + 1


def _order(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> list[Block]:
    """The blocks as list scheduling orders them."""
    number_of = {position: number for number, block in enumerate(blocks) for position in block}
    single = tasks(instructions)
    released = {i.node for i in instructions if isinstance(i, Release)}
    together: list[Task] = []
    for number, block in enumerate(blocks):
        after = {number_of[before] for position in block for before in single[position].after} - {number}
        seconds = sum(single[position].time_s for position in block)
        first = instructions[block[0]]
        sets_up_next = isinstance(first, SyncWeights) and first.node in released
        together.append(Task(seconds, single[block[0]].resources, tuple(sorted(after)), sets_up_next))
    return [blocks[number] for number in arrange(together)]


def _eager_first(
    instructions: Sequence[Instruction], blocks: Sequence[Block], order: Sequence[Block]
) -> list[Block]:
    """The blocks in `order`, but the eager ones as soon as all is done that they wait for."""
    eager = _eager(instructions, blocks)
    out = _ripe(eager, set())
    done = {position for block in out for position in block}
    for block in (b for b in order if b not in eager):
        done.update(block)
        out.append(block)
        while ripe := [b for b in _ripe(eager, done) if b[0] not in done]:
            done.update(position for b in ripe for position in b)
            out += ripe
    return out


def _ripe(eager: Mapping[Block, set[int]], done: set[int]) -> list[Block]:
    return [block for block, before in eager.items() if before <= done]


def _eager(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> dict[Block, set[int]]:
    """What only keeps or drops, with what each waits for."""
    first = ((block, instructions[block[0]]) for block in blocks)
    return {
        block: set(instruction.after) for block, instruction in first if isinstance(instruction, Timeless)
    }


def _with_frees(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> tuple[Instruction, ...]:
    """The instructions in the order of `blocks`; after the block that uses a handle last, one that drops it
    everywhere."""
    users: dict[str, list[int]] = {}
    last: dict[str, Block] = {}
    for block in blocks:
        for position in block:
            i = instructions[position]
            for handle in dict.fromkeys((*handles_read(i), *handles_written(i))):
                users.setdefault(handle, []).append(position)
                last[handle] = block
    dead: dict[Block, list[str]] = {}
    for handle in sorted(last):
        dead.setdefault(last[handle], []).append(handle)
    out: list[Instruction] = []
    moved: dict[int, int] = {}  # from positions in the given list to those in the new one
    for block in blocks:
        for position in block:
            moved[position] = len(out)
            after = sorted(moved[before] for before in instructions[position].after)
            out.append(replace(instructions[position], after=tuple(after)))
        if handles := dead.get(block):
            used = {user for handle in handles for user in users[handle]}
            devices = tuple(sorted({d for user in used for d in instructions[user].devices}))
            after = tuple(sorted(moved[user] for user in used))
            out.append(Free(instructions[block[-1]].node, devices, tuple(handles), after=after))
    return tuple(out)
