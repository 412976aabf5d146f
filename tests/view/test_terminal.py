from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import pytest

import hflow
from hflow import units
from hflow.plan.edges import WeightEdge
from hflow.plan.plan import Plan, Search
from hflow.plan.program import Call
from hflow.plan.strategy import Strategy
from hflow.view import words
from hflow.view.terminal.evaluations import evaluations
from hflow.view.terminal.remarks import idle_fraction, path_names, remarks
from hflow.view.terminal.stages import edge_rows
from hflow.view.terminal.table import table
from hflow.view.terminal.terminal import cluster_text, measured_text, plan_text, search_text
from tests.view.examples import (
    EDGES,
    GRAPH,
    NODE_PLANS,
    OFFLOAD_PLAN,
    OFFLOAD_S,
    PLAN,
    RELOAD_S,
)
from tests.view.examples_in_time import NUM_ROUNDS, ROUNDS_PLAN


def without_hash(text: str) -> str:
    """The hash changes with every new field of a plan, which is not the business of these tests."""
    assert PLAN.hash in text
    return text.replace(PLAN.hash, "0123456789ab")


def test_plan_text_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden("view/plan.txt", without_hash(plan_text(PLAN, path="build/grpo.plan.json")))


def test_narrow_ascii_plan_text_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    text = plan_text(PLAN, width=80, ascii_only=True)
    assert text.isascii()
    golden("view/plan-80-ascii.txt", without_hash(text))


def test_measured_text_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    measured = {n.node: 1.1 * n.time_s + 2.4 * (n.node == "reward") for n in NODE_PLANS}
    golden("view/measured.txt", measured_text(PLAN, [metrics(measured)]))


def test_only_what_is_off_is_flagged() -> None:
    times = {n.node: n.time_s for n in NODE_PLANS}
    assert flagged(PLAN, metrics({**times, "rollout": 1.24 * times["rollout"]})) == []
    assert flagged(PLAN, metrics({**times, "rollout": 0.7 * times["rollout"]})) == ["rollout"]


def test_what_is_off_by_little_of_the_step_is_not_flagged() -> None:
    times = {n.node: n.time_s for n in NODE_PLANS}
    step_s = sum(times.values())
    assert 3 * times["prompts"] < 0.05 * step_s
    assert flagged(PLAN, metrics({**times, "prompts": 3 * times["prompts"]})) == []
    reward_s = times["reward"] + 0.04 * step_s
    assert reward_s > 1.25 * times["reward"]
    assert flagged(PLAN, metrics({**times, "reward": reward_s})) == []
    assert flagged(PLAN, metrics({**times, "reward": reward_s + 0.04 * step_s})) == ["reward"]


def test_more_rounds_than_predicted_are_no_miss_of_the_prediction() -> None:
    """Predicted are 3 rounds; 6 take twice as long, and as long as predicted if each took as long."""
    inner = ("prompts", "rollout", "reward", "sampling")
    times = {n.node: n.time_s * (2 if n.node in inner else 1) for n in ROUNDS_PLAN.nodes}
    assert flagged(ROUNDS_PLAN, {**metrics(times), "sampling.rounds": 2.0 * NUM_ROUNDS}) == []
    assert "rollout" in flagged(ROUNDS_PLAN, {**metrics(times), "sampling.rounds": 1.0 * NUM_ROUNDS})


def metrics(times: dict[str, float]) -> dict[str, float]:
    """A line of metrics.jsonl, of which these matter here."""
    return {f"time_s.{name}": seconds for name, seconds in times.items()}


def flagged(plan: Plan, line: dict[str, float]) -> list[str]:
    rows = measured_text(plan, [line]).splitlines()
    return [row.split()[0] for row in rows if row.endswith("!") and not row.startswith("sum")]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_numbers_are_never_cut(width: int) -> None:
    text = plan_text(PLAN, width)
    for node in NODE_PLANS:
        assert units.seconds(node.time_s) in text
    for edge in EDGES:
        if isinstance(edge, WeightEdge) or edge.collective != "alias":
            assert units.size(edge.size_bytes) in text and units.seconds(edge.time_s) in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_asked(width: int) -> None:
    assert max(map(len, plan_text(PLAN, width).splitlines())) <= width


def test_the_path_is_connected_and_ends_last() -> None:
    path = path_names(PLAN)
    assert path[-1] == max(NODE_PLANS, key=lambda n: n.start_s + n.time_s).node
    assert path[0] in [n for n, degree in GRAPH.dag().in_degree if degree == 0]
    on_devices = nx.DiGraph(GRAPH.dag())
    on_devices.add_edge("reward", "ref_logprobs")  # both run on devices 4-7
    assert nx.is_path(on_devices, list(path))


def test_the_path_tells_moves_that_take_a_hundredth_of_the_step() -> None:
    """The weights take 0.19 s: more than a hundredth of a step of 18.99 s, not of one of 27.5 s."""
    assert not any("=>" in name for name in path_names(PLAN))
    shorter = tuple(
        replace(i, time_s=i.time_s - 8.6) if isinstance(i, Call) and i.node == "actor_train" else i
        for i in PLAN.step.instructions
    )
    plan = replace(PLAN, step=replace(PLAN.step, instructions=shorter), step_time_s=PLAN.step_time_s - 8.6)
    assert "[actor => rollout, 0.19 s]" in path_names(plan)


def test_idle_is_the_part_in_which_nothing_runs() -> None:
    """Devices 0-3 wait for ref_logprobs, less the 10 ms of advantages; 4-7 while the actor is trained."""
    idle_s = 4 * (3.2 - 0.01) + 4 * 9.7
    assert idle_fraction(PLAN) == pytest.approx(idle_s / (8 * PLAN.step_time_s), abs=1e-3)
    notes = [text for label, text in remarks(PLAN) if label == "note"]
    assert notes[1:] == [
        "device 0-3 is idle for 12% of the step, 3.2 s of it while ref_logprobs runs on 4-7",
        "device 4-7 is idle for 35% of the step, 9.7 s of it while actor_train runs on 0-3",
    ]


def test_f32_on_gpus_is_told() -> None:
    """By the data sheet, 19.5 TFLOP/s in f32 and 312 in bf16 on an A100."""
    note = ("note", "in f32: actor, ref; with `dtype: bf16` products run 16 times as fast")
    assert note in remarks(PLAN)
    cpu = replace(PLAN.cluster, device=replace(PLAN.cluster.device, platform="cpu"))
    assert note not in remarks(replace(PLAN, cluster=cpu))
    with_amx = replace(cpu, device=replace(cpu.device, bf16_flops=5 * cpu.device.flops))
    faster = (note[0], note[1].replace("16 times", "5 times"))
    assert faster in remarks(replace(PLAN, cluster=with_amx))
    graph = replace(GRAPH, models=tuple(replace(model, dtype="bf16") for model in GRAPH.models))
    assert note not in remarks(replace(PLAN, step=replace(PLAN.step, graph=graph)))


def test_memory_that_plans_leave_free_is_told() -> None:
    assert "   80.0 GB each   " in cluster_text(PLAN.cluster)
    device = replace(PLAN.cluster.device, reserve_bytes=8_000_000_000)
    assert "   72.0 of 80.0 GB each   " in cluster_text(replace(PLAN.cluster, device=device))


def test_where_all_devices_have_work_none_is_named() -> None:
    """Others: tests/compiler/test_unused_devices.py."""
    assert not any("nothing to do" in text for _, text in remarks(PLAN))


def test_what_waits_in_the_hosts_memory_is_told_with_its_price() -> None:
    told = [text for label, text in remarks(OFFLOAD_PLAN) if label == "offload"]
    assert told == [
        f"ref_logprobs: the weights of ref wait in the host's memory, {RELOAD_S} s per step",
        f"actor_train: the optimizer of actor waits in the host's memory, {2 * OFFLOAD_S} s per step",
    ]
    assert f"[offload actor_train, {OFFLOAD_S} s]" in " ".join(path_names(OFFLOAD_PLAN))
    assert not any(label == "offload" for label, _ in remarks(PLAN))


def test_layouts_say_how_memory_is_saved() -> None:
    ref, actor = (OFFLOAD_PLAN.node(name) for name in ("ref_logprobs", "actor_train"))
    assert words.layout(ref) == "dp4 offload"
    assert words.layout(actor) == "dp2 tp2 ep2 zero1 recompute offload"
    assert words.marks(actor) == "ep2 zero1 recompute offload"
    assert words.layout(replace(actor, strategy=Strategy(), offload=False)) == "dp2 tp2"


@pytest.mark.parametrize(
    ("search", "text"),
    [
        (Search(1, 0.0), "1 plan compared, proven best"),
        (Search(9999, 0.001, 29.7), "9,999 plans compared, gap <1% (no plan under 29.7 s)"),
        (Search(12, 0.031, 0.5), "12 plans compared, gap 3% (no plan under 0.50 s)"),
        (Search(3, None, planner="hybridflow"), "hybridflow: 3 plans compared, not proven best"),
        (Search(1, 0.0, pinned=("rollout",)), "1 plan compared with 1 node pinned, proven best"),
        (
            Search(2, 0.5, 1.0, pinned=("a", "b")),
            "2 plans compared with 2 nodes pinned, gap 50% (no plan under 1.0 s)",
        ),
    ],
)
def test_the_search_claims_what_it_proved(search: Search, text: str) -> None:
    assert search_text(search) == text


def test_moves_that_are_long_enough_have_bars_without_a_name() -> None:
    text = plan_text(OFFLOAD_PLAN, width=140)
    line = next(line for line in text.splitlines() if line.startswith("device 0-3"))
    cells = len(line.removeprefix("device 0-3")) - 3
    moves = 0.19 + 2 * OFFLOAD_S
    assert line.count("─") == pytest.approx(moves / OFFLOAD_PLAN.step_time_s * cells, abs=2)


def test_most_data_edges_are_only_counted() -> None:
    """Of four that move and four that stay, the two that take longest have a line, in the graph's order."""
    times = {e.name: 0.001 * (n + 1) for n, e in enumerate(EDGES) if e.collective != "alias"}
    edges = [replace(e, time_s=times.get(e.name, 0.0)) for e in EDGES]
    rows = edge_rows(GRAPH, edges, most=2)
    assert [row[0] for row in rows] == [
        "actor => rollout", "rollout -> actor_train", "ref_logprobs -> actor_train", "+ 6 data edges",
    ]  # fmt: skip
    assert rows[-1] == ("+ 6 data edges", "", "37.7 MB", "", "", "4 alias, 2 p2p", "9 ms")
    assert len(edge_rows(GRAPH, edges)) == 1 + 4 + 1


def test_names_shrink_before_anything_else() -> None:
    lines = table((("name", "left"), ("n", "right")), [("a" * 30, "1,234,567")], 25).splitlines()
    assert lines[1] == "a" * 13 + "…  1,234,567"
    assert len(table((("n", "right"),), [("1" * 40,)], 10).splitlines()[1]) == 40


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "-"),
        (0.0002, "<1 ms"),
        (0.0123, "12 ms"),
        (0.0997, "0.10 s"),
        (0.194, "0.19 s"),
        (14.04, "14.0 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "-"), (512, "512 B"), (3_100_000, "3.1 MB"), (15_231_233_024, "15.2 GB")]
)
def test_size(value: float, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (1234, "1,234"), (16_700, "16.7 k"), (1_234_567, "1.23 M")]
)
def test_count(value: float, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(("value", "text"), [(42, "42.0 s"), (1240, "20 min 40 s"), (11_100, "3 h 5 min")])
def test_duration(value: float, text: str) -> None:
    assert units.duration(value) == text


def test_evaluations_say_where_they_run_apart_from_the_step() -> None:
    graph = hflow.load("tests/runtime/graphs/evaluated.yaml", ["params.model=shape:qwen2.5-0.5b"])
    plan = hflow.compile(graph, "h100x8", ["rollout@greedy=dp2@2-3"])
    told = [text for _, text in evaluations(plan)]
    assert told[0].endswith(": score, length, finished; rollout@greedy on dp2 @2-3")
    assert told[1].endswith(": mean, pass@1, pass@4, maj@3")
