"""Put a program's instructions into the order in which the workers walk through them.

That of `random_search.best_order`, of loops' bodies that of `list_scheduling.arrange`, but a node's onload,
call and offload stay together; a copy of weights that lasts for this step only comes directly before its
first reader, so that others can have the memory; and what only keeps or drops comes as soon as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from hflow.schedule.list_scheduling import arrange
from hflow.schedule.random_search import best_order
from hflow.schedule.task_times import Order, Task
from hflow.schedule.tasks import tasks
from hflow.schedule.timed_span import loop_time_s

Block = tuple[int, ...]  # positions of instructions that run one directly after the other


def arranged(program: Program) -> Program:
    """The program in an order in which its steps are short, bodies of loops too, with frees and the loops'
    times."""
    return replace(program, instructions=_arranged(program.graph, program.instructions, best_order))


def step_tasks(program: Program) -> list[Task]:
    """What `arranged` puts in order."""
    instructions = _timed(program.graph, program.instructions)
    return _tasks(instructions, list(_lasting(instructions)))


def _arranged(
    graph: Graph, instructions: Sequence[Instruction], ordered: Callable[[Sequence[Task]], Order]
) -> tuple[Instruction, ...]:
    timed = _timed(graph, instructions)
    lasting = list(_lasting(timed))
    order = [lasting[number] for number in ordered(_tasks(timed, lasting))]
    return _with_frees(timed, _eager_first(timed, order))


def _timed(graph: Graph, instructions: Sequence[Instruction]) -> list[Instruction]:
    """With the bodies of loops arranged, which tells how long their rounds take."""
    return [_with_rounds(graph, i) if isinstance(i, Loop) else i for i in instructions]


def _with_rounds(graph: Graph, loop: Loop) -> Loop:
    loop = replace(loop, body=_arranged(graph, loop.body, arrange))
    return replace(loop, time_s=loop_time_s(graph, loop))


def _lasting(instructions: Sequence[Instruction]) -> Iterator[Block]:
    """What runs for some time: an onload, the call and the offload of a node in one block, all else alone."""
    start = 0
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Timeless):
            start = position + 1
            continue
        following = instructions[position + 1 : position + 2]
        if not isinstance(instruction, Onload) and not any(isinstance(i, Offload) for i in following):
            yield tuple(range(start, position + 1))
            start = position + 1


def _tasks(instructions: Sequence[Instruction], lasting: Sequence[Block]) -> list[Task]:
    """One for each block. What waits for an instruction that takes no time waits for what that one waits
    for."""
    number_of = {position: number for number, block in enumerate(lasting) for position in block}
    waits: list[set[int]] = []  # of each instruction, for which blocks
    for instruction in instructions:
        before = ({number_of[p]} if p in number_of else waits[p] for p in instruction.after)
        waits.append(set[int]().union(*before))
    released = {i.node for i in instructions if isinstance(i, Release)}
    single, found = tasks(instructions), list[Task]()
    for number, block in enumerate(lasting):
        after = set[int]().union(*(waits[position] for position in block)) - {number}
        seconds = sum(single[position].time_s for position in block)
        first = instructions[block[0]]
        sets_up_next = isinstance(first, SyncWeights) and first.node in released
        found.append(Task(seconds, single[block[0]].resources, tuple(sorted(after)), sets_up_next))
    return found


def _eager_first(instructions: Sequence[Instruction], order: Sequence[Block]) -> list[Block]:
    """The blocks in `order`, and each instruction that takes no time as soon as all is done that it waits
    for."""
    eager = {n: {*i.after} for n, i in enumerate(instructions) if isinstance(i, Timeless)}
    done: set[int] = set()
    out: list[Block] = []
    for block in ((), *order):
        done.update(block)
        out += [block] if block else []
        while ripe := [n for n, before in eager.items() if before <= done and n not in done]:
            done.update(ripe)
            out += [(n,) for n in ripe]
    return out


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
