"""What every worker receives is what the plan's copies say, edge by edge, in every step."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import hflow
from hflow.compiler.lowering import row_bytes
from hflow.plan.edges import Copy, DataEdge, WeightEdge
from hflow.plan.layout import volume
from hflow.plan.plan import Plan
from hflow.plan.program import SyncWeights, Transfer
from hflow.plan.samples import is_whole_text
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.tokenizer import load_tokenizer
from tests.runtime.matrix import FACTORS, GRAPHS, Case, Matrix, cases
from tests.runtime.recording import Recorded

CASES = cases()
Received = Counter[tuple[str, int, int]]  # bytes by edge, step and device
TOLD_BYTES = 8  # a length, or the version of the weights that sampled a text


def measured(run: Run, kind: str, what: str) -> Received:
    lines = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    found = Received()
    for event in (line for line in lines if line.get("kind") == kind):
        found[event["name"], event["step"], event["device"]] += event[what]
    return +found


def transfers(plan: Plan) -> list[tuple[Transfer, DataEdge]]:
    return [(i, plan.step.data_edge(i)) for i in plan.step.instructions if isinstance(i, Transfer)]


def weight_edges(plan: Plan) -> list[WeightEdge]:
    """Those over which an instruction moves weights."""
    return [plan.step.weight_edge(i) for i in plan.step.instructions if isinstance(i, SyncWeights)]


def weights_of(plan: Plan) -> Received:
    """Every copy of every tensor, at its receiver; f32."""
    expected = Received()
    for edge in weight_edges(plan):
        for step, copies in product(range(plan.graph.steps), edge.copies):
            for copy in copies.copies:
                expected[edge.name, step, copy.target] += 4 * len(copies.tensors) * volume(copy.box)
    return expected


def row_copies(plan: Plan) -> Iterator[tuple[int, Transfer, DataEdge, Copy]]:
    """With the step, of every step of the graph."""
    for instruction, edge in transfers(plan):
        for step, copies in product(range(plan.graph.steps), edge.copies):
            yield from ((step, instruction, edge, copy) for copy in copies.copies)


def rows_of(plan: Plan, one: Recorded) -> Received:
    """Every copied row, as long as it was in the run of one worker."""
    expected = Received()
    for step, instruction, edge, copy in row_copies(plan):
        for port in instruction.inputs:
            sizes = one.sizes[step, edge.source, port]
            expected[edge.name, step, copy.target] += sizes.bytes(*copy.box[0])
    return +expected


def told_of(plan: Plan, one: Recorded) -> Received:
    """A length for every ragged row, a version for every row of a text."""
    expected = Received()
    for step, instruction, edge, copy in row_copies(plan):
        types = {port: type_ for port, type_ in zip(edge.ports, edge.types) if port in instruction.inputs}
        told = sum(one.sizes[step, edge.source, port].ragged for port in types)
        told += sum(map(is_whole_text, types.values()))
        expected[edge.name, step, copy.target] += TOLD_BYTES * told * volume(copy.box)
    return +expected


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights(matrix: Matrix, case: Case) -> None:
    assert measured(matrix.run(case), "weights", "bytes") == weights_of(matrix.plan(case))


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows(matrix: Matrix, case: Case) -> None:
    run, plan, one = matrix.run(case), matrix.plan(case), matrix.one(case.algorithm)
    assert measured(run, "transfer", "bytes") == rows_of(plan, one)
    assert measured(run, "transfer", "told_bytes") == told_of(plan, one)


@pytest.mark.slow
def test_the_cases_move_something(matrix: Matrix) -> None:
    """Rows and weights move in most of them, in some over relays."""
    plans = [matrix.plan(case) for case in CASES]
    rows = [plan for plan in plans if any(edge.bytes_per_device for _, edge in transfers(plan))]
    weights = [plan for plan in plans if any(edge.bytes_per_device for edge in weight_edges(plan))]
    assert min(len(rows), len(weights)) > len(plans) // 2
    assert any(copy.phase for plan in plans for *_, copy in row_copies(plan))


def predicted(plan: Plan) -> Received:
    """Every copied row of the moved ports at its greatest length."""
    expected = Received()
    for step, instruction, edge, copy in row_copies(plan):
        width = sum(row_bytes(t) for port, t in zip(edge.ports, edge.types) if port in instruction.inputs)
        expected[edge.name, step, copy.target] += width * volume(copy.box)
    return +expected


def endless(model: Path, folder: Path) -> Path:
    """A copy of a model that never ends a text: the first number of every embedding is so large that it stays
    positive through all layers; the row of the end in the output matrix makes a very small logit of it."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 100
    head = tensors["lm_head.weight"]
    head[:, 0] = 0
    head[load_tokenizer(folder).eos_id, 0] = -1000
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("placement", FACTORS["placement"])
def test_rows_of_the_greatest_lengths_are_the_planners_bytes(
    many_workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path: Path, placement: str
) -> None:
    """Where all prompts and responses are as long as can be, values have the very bytes that the planner
    counts, on every worker, and on the busiest those that the plan shows."""
    models = {"model": endless(tiny_model, tmp_path / "model"), "reward_model": tiny_reward}
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(f'{{"question": "{100 + i}+{200 + i}"}}\n' for i in range(60)))
    params = {**models, "dataset": data, "steps": 1}
    given = [f"params.{name}={value}" for name, value in params.items()]
    graph = hflow.load(GRAPHS / "ppo_small.yaml", given)
    case = next(c for c in CASES if (c.algorithm, c.placement) == ("ppo", placement))
    plan = hflow.compile(graph, case.cluster, case.pins)
    run = execute(plan, tmp_path / "run", pool=many_workers, export=False)
    received = measured(run, "transfer", "bytes")
    assert received == predicted(plan) and received
    for instruction, edge in transfers(plan):
        if set(instruction.inputs) == set(edge.ports):
            busiest = max((size for (name, *_), size in received.items() if name == edge.name), default=0)
            assert busiest == edge.bytes_per_device
