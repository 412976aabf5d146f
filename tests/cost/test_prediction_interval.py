"""The interval of a prediction: what it is made of, and which one a plan has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hflow
from benchmarks import intervals
from benchmarks.intervals import Case, interval, published_cases, report, table, with_table
from hflow import units
from hflow.cost.prediction_interval import RATIOS, Interval, node_interval, step_interval
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan import Plan
from hflow.view.pages.plan_page import plan_html
from hflow.view.terminal.plan_json import plan_json
from hflow.view.terminal.terminal import plan_text

ROOT = Path(__file__).parents[2]
SHAPE = ["params.model=shape:qwen2.5-7b"]


def compiled(algorithm: str, cluster: Cluster, *overrides: str) -> Plan:
    return hflow.compile(hflow.load(ROOT / f"algorithms/{algorithm}.yaml", overrides), cluster)


def test_intervals_are_those_of_the_newest_results() -> None:
    made = report(intervals.cases())["intervals"]
    found: dict[str, dict[str, Interval]] = {"cuda": {}, "cpu": {}}
    for line in made:
        found[line["platform"]][line["timed"]] = Interval(line["low"], line["high"])
    assert found == RATIOS


def test_the_page_has_the_table_of_the_newest_result() -> None:
    newest = intervals.newest("intervals")
    made = report(intervals.cases())
    assert {**newest, "date": made["date"]} == made
    page = intervals.PAGE.read_text()
    assert with_table(page, table(newest)) == page


def test_published_figures_of_other_models_and_systems_are_inside() -> None:
    """Four in five of all and of steps, at a median half-width of a fifth or less."""
    found = report(intervals.cases())
    assert found["held_of_published"] >= 0.8 and found["held_of_published_steps"] >= 0.8
    assert found["median_half_width_of_published"] <= 0.2


def test_an_interval_leaves_out_as_many_at_either_end() -> None:
    """Of 40 ratios three in twenty, three at each end; of 13 none. Ends are rounded outwards."""
    ratios = [1 + i / 100 for i in range(40)]
    assert interval(ratios) == (1.03, 1.36)
    assert interval(list(reversed(ratios[:13]))) == (1.0, 1.12)
    assert interval([1.006, 1.234]) == (1.0, 1.24)


def test_ratios_are_of_measured_to_predicted_times() -> None:
    """20 % too many tokens per second are 1.2 times the predicted time, as are 1 / 1.2 of the seconds."""
    row = {"kind": "training", "system": "a", "model": "m", "use": "held out", "unit": "tokens/s/GPU"}
    rows: list[dict[str, Any]] = [
        {**row, "error": 0.2},
        {**row, "kind": "GRPO step", "unit": "s", "error": 1 / 1.2 - 1},
        {**row, "use": "fitted", "error": 0.5},
        {**row, "kind": "transition", "unit": "s", "error": 0.5},
        {**row, "reason": "none"},
        {**row, "kind": "PPO step", "system": "NeMo-Aligner", "error": 0.5},
    ]
    found = list(published_cases({"rows": rows}))
    assert [(case.platform, case.timed, case.group) for case in found] == [
        ("cuda", "train", "a m"),
        ("cuda", "step", "a m"),
    ]
    assert [case.ratio for case in found] == pytest.approx([1.2, 1.2])


def test_a_group_is_judged_by_the_others() -> None:
    """Two groups that differ: neither is inside the other's interval, though all are inside that of both."""
    found = [Case("cpu", "train", "a", 1.0), Case("cpu", "train", "b", 2.0)]
    (line,) = report([*found, Case("cuda", "train", "c", 1.0), Case("cuda", "train", "d", 1.0)])["intervals"][
        :1
    ]
    assert (line["low"], line["high"], line["cases"], line["held"]) == (1.0, 2.0, 2, 0)


def roomy(cluster: Cluster) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=80 * 10**9))


def calibrated(name: str) -> Cluster:
    """As `hflow calibrate` writes one; `pairs`: H100s with little memory, two on a host."""
    cluster = roomy(load_cluster("h100x8" if name == "pairs" else name))
    if name == "pairs":
        device = replace(cluster.device, memory_bytes=7_000_000_000, reserve_bytes=0)
        return replace(cluster, hosts=16, devices_per_host=2, device=device)
    shares = replace(cluster.device.calibration, weights_efficiency=0.5)
    return replace(cluster, device=replace(cluster.device, calibration=shares))


@pytest.mark.parametrize(
    ("algorithm", "cluster", "model", "ratios"),
    [
        ("grpo", "h100x8", "qwen2.5-7b", RATIOS["cuda"]["step"]),
        ("sft", "h100x8", "qwen2.5-7b", RATIOS["cuda"]["train"]),
        ("grpo", "h100x8", "qwen3-30b-a3b", RATIOS["cuda"]["step with experts"]),
        ("grpo", "pairs", "qwen2.5-7b", RATIOS["cuda"]["step over hosts"]),
        ("sft", "h100x8", "qwen3-30b-a3b", None),
        ("grpo", "local", "qwen3-0.6b", RATIOS["cpu"]["step"]),
    ],
)
def test_a_step_has_the_interval_of_its_kind(
    algorithm: str, cluster: str, model: str, ratios: Interval | None
) -> None:
    plan = compiled(algorithm, calibrated(cluster), f"params.model=shape:{model}")
    expected = ratios and [plan.step_time_s * ratio for ratio in ratios]
    assert step_interval(plan) == (expected and pytest.approx(expected))


def test_nothing_is_said_of_cpus_that_nobody_measured() -> None:
    plan = compiled("grpo", roomy(load_cluster("local")), "params.model=shape:qwen3-0.6b")
    assert step_interval(plan) is None and node_interval(plan, plan.node("rollout")) is None
    assert "likely" not in plan_text(plan) and "likely" not in plan_html(plan)
    assert plan_json(plan, 0.0)["step_interval_s"] is None


def test_text_page_and_json_tell_it() -> None:
    plan = compiled("grpo", load_cluster("h100x8"), *SHAPE)
    low, high = step_interval(plan) or (0, 0)
    text = f"likely {units.interval(low, high)}"
    assert f"({text})" in plan_text(plan) and text in plan_html(plan)
    told = json.loads(json.dumps(plan_json(plan, 0.0)))
    assert told["step_interval_s"] == [low, high]
    nodes = {node["name"]: node["time_interval_s"] for node in told["nodes"]}
    assert nodes["prompts"] is None
    rollout = plan.node("rollout")
    assert nodes["rollout"] == pytest.approx([rollout.time_s * ratio for ratio in RATIOS["cuda"]["generate"]])


def test_a_step_that_takes_no_time_has_none() -> None:
    plan = replace(compiled("grpo", load_cluster("h100x8"), *SHAPE), step_time_s=0.0)
    assert "likely" not in plan_text(plan)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.42, 0.72, "0.42 to 0.72 s"),
        (0.042, 0.12, "42 ms to 0.12 s"),
        (10.0, 19.96, "10.0 to 20.0 s"),
        (1e-4, 9e-4, "<1 ms"),
    ],
)
def test_units_are_told_once(low: float, high: float, text: str) -> None:
    assert units.interval(low, high) == text
