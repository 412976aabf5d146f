"""Layouts of rows against brute force: who makes which samples, and reads which prompts."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.compiler.lowering import lower_rows
from hflow.cost.redistribution import rows_s
from hflow.graph.ir import Input, Node, Output, Ref
from hflow.graph.types import Dim, Factor, ValueType
from hflow.plan.cluster import Cluster, DeviceKind, Link
from hflow.plan.layout import Layout, Mesh, Replicate, Shard
from hflow.plan.ports import generates_evenly, input_layout, output_layout

KIND = DeviceKind("A100", "cuda", 312e12, 80 * 10**9, 2e12, 0.5, 0.0)
SEQUENCE = Dim((Factor("seq", 8, "made"),), ragged=True)


def texts(*rows: int) -> ValueType:
    factors = tuple(Factor(f"rows{n}", size, "made") for n, size in enumerate(rows))
    return ValueType("i32", (Dim(factors), SEQUENCE))


def first_turn(prompts: tuple[int, ...], samples: int) -> Node:
    made = Output("tokens", texts(*prompts, samples))
    read = Input("prompt", Ref("data", "tokens"), texts(*prompts))
    return Node("rollout", "generate", inputs=(read,), outputs=(made,), options={"n": samples})


def later_turn(prompts: int, samples: int) -> Node:
    rows = texts(prompts, samples)
    return Node(
        "again", "generate", inputs=(Input("tokens", Ref("rollout", "tokens"), rows),),
        outputs=(Output("tokens", rows),),
    )  # fmt: skip


def shares(rows: int, samples: int, dp: int) -> bool:
    """Whether `dp` equal parts of the rows each have whole prompts, or rows of one."""
    if rows % dp:
        return False
    parts = [range(i * rows // dp, (i + 1) * rows // dp) for i in range(dp)]
    whole = all(part.start % samples == part.stop % samples == 0 for part in parts)
    return whole or all(part.start // samples == (part.stop - 1) // samples for part in parts)


@pytest.mark.parametrize("samples", range(1, 13))
def test_replicas_have_whole_prompts_or_some_of_the_samples_of_one(samples: int) -> None:
    for prompts in range(1, 13):
        for dp in range(1, prompts * samples + 2):
            expected = shares(prompts * samples, samples, dp)
            assert generates_evenly(first_turn((prompts,), samples), dp) == expected
            assert generates_evenly(later_turn(prompts, samples), dp) == expected


def nodes() -> Iterator[tuple[Node, int, int]]:
    """First turns with all numbers of replicas that there may be: of 3 prompts; of 2 times 3, with `samples`
    to each."""
    for prompts, samples in (((3,), 4), ((2, 3), 4), ((1, 4), 2), ((5,), 6)):
        node = first_turn(prompts, samples)
        for dp in range(1, prod(prompts) * samples + 1):
            if generates_evenly(node, dp):
                yield node, samples, dp


@pytest.mark.parametrize("tp", [1, 2])
def test_each_replica_reads_the_prompts_of_its_samples_and_no_others(tp: int) -> None:
    seen = 0
    for node, samples, dp in nodes():
        mesh = Mesh.of(tuple(range(dp * tp)), dp=dp, tp=tp)
        made, read = node.outputs[0].type, node.inputs[0].type
        rows = output_layout(node, mesh, made).boxes((made.rows,))
        prompts = input_layout(node, mesh, read).boxes((read.rows,))
        for device in mesh.devices:
            (first, end), replica = rows[device][0], device // tp
            assert (first, end) == (replica * made.rows // dp, (replica + 1) * made.rows // dp)
            assert {*range(*prompts[device][0])} == {row // samples for row in range(first, end)}
        seen += dp > node.inputs[0].type.rows
    assert seen >= 8


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(nodes())), st.data())
def test_data_edges_bring_them(drawn: tuple[Node, int, int], data: st.DataObject) -> None:
    """From and to layouts of whole prompts elsewhere, with what the copies do to arrays; their time is that
    of the fullest receiver at least."""
    node, _, dp = drawn
    devices = data.draw(st.permutations(range(48)))
    mesh = Mesh.of(tuple(devices[:dp]), dp=dp)
    prompts = node.inputs[0].type.dims[0].factors[0].size or 1
    whole = data.draw(st.sampled_from([d for d in range(1, 7) if prompts % d == 0]))
    other = Mesh.of(tuple(data.draw(st.permutations(range(48)))[: 2 * whole]), dp=whole, tp=2)
    cluster = Cluster("test", KIND, 6, 8, Link(300e9, 1e-5), Link(25e9, 1e-5))
    read, made = node.inputs[0].type, node.outputs[0].type
    ends = (
        (read, whole_groups(other, read), input_layout(node, mesh, read)),
        (made, output_layout(node, mesh, made), whole_groups(other, made)),
    )
    for type_, source, target in ends:
        held, needed = (layout.boxes((type_.rows,)) for layout in (source, target))
        memory = {device: np.full(type_.rows, -1) for device in {*held, *needed}}
        for device, ((first, end),) in held.items():
            memory[device][first:end] = range(first, end)
        lowered = lower_rows((type_,), source, target, cluster)
        for copy in (copy for part in lowered.copies for copy in part.copies):
            (span,) = copy.box
            assert (memory[copy.source][slice(*span)] >= 0).all()
            memory[copy.target][slice(*span)] = memory[copy.source][slice(*span)]
        for device, ((first, end),) in needed.items():
            assert memory[device][first:end].tolist() == list(range(first, end))
        seconds = rows_s(type_.rows, 1000, source, target, cluster)
        most = max(len({*range(*box[0])} - {*range(*held.get(d, ((0, 0),))[0])}) for d, box in needed.items())
        assert (seconds == 0) == (most == 0) and seconds >= most * 1000 / 300e9


def whole_groups(mesh: Mesh, type_: ValueType) -> Layout:
    unit = prod(f.size or 1 for f in type_.dims[0].factors[1:])
    return Layout(mesh, (Replicate(), Shard(0, unit), Replicate()))


@pytest.mark.parametrize("tp", [1, 2])
def test_joined_replicas_have_what_each_of_them_reads(tp: int) -> None:
    """So what a data node makes there, generation reads where it lies."""
    mesh = Mesh.of((5, 4, 7, 6, 1, 0, 3, 2, 8, 9, 11, 10, 12, 13, 15, 14), dp=16 // tp, tp=tp)
    node = first_turn((2,), 8)
    joined = mesh.joined(mesh.dp // 2)
    assert joined.devices == mesh.devices and (joined.dp, joined.tp) == (2, 8)
    read = input_layout(node, mesh, texts(2)).boxes((2,))
    assert whole_groups(joined, texts(2)).boxes((2,)) == read
