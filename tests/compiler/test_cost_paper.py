"""The comparison of benchmarks/paper.py: its workload, and what it says of published figures."""

from __future__ import annotations

import pytest

from benchmarks.paper import (
    PLANNERS,
    Prediction,
    at_the_papers_size,
    notes,
    ppo,
    predictions,
    published,
    report,
    uncached_share_of_peak,
    wake_up_s,
)
from benchmarks.planners import Case, Planned
from benchmarks.planners import report as compared
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.workload import Workload, workload


def test_the_workload_is_the_papers() -> None:
    """Section 8.1: 1,024 prompts of 1,024 tokens, as long responses, one epoch of 8 updates, bf16."""
    graph = ppo("13B")
    assert workload(graph.node("rollout")) == Workload(1024, 1024, 1024)
    trained = Workload(1024, 1024, 1024, optimizer_steps=8, rows_per_update=128)
    assert workload(graph.node("actor_train")) == workload(graph.node("critic_train")) == trained
    assert {m.dtype for m in graph.models} == {"bf16"}
    assert {m.path for m in graph.models} == {"shape:llama-13b"}


def test_the_other_systems_score_what_was_sampled_once_more() -> None:
    plain, scored = ppo("7B"), ppo("7B", scores_samples=True)
    assert {n.name for n in scored.nodes} - {n.name for n in plain.nodes} == {"actor_logprobs"}
    old = scored.node("actor_train").input("old_logprobs")
    assert old and str(old.source) == "actor_logprobs.logprobs"


def test_safe_rlhf_has_six_models_and_texts_of_the_same_size() -> None:
    graph = at_the_papers_size("safe_rlhf", "7B")
    assert {m.path for m in graph.models} == {"shape:llama-7b"} and len(graph.models) == 6
    assert workload(graph.node("cost_values")) == Workload(1024, 1024, 1024)


def test_every_baseline_has_a_published_figure_up_to_32_gpus() -> None:
    figures = published()
    assert {system for _, _, system in figures} == set(PLANNERS) - {"hflow"}
    assert figures["7B", 8, "nemo"] == 727
    assert len(figures) == 6 * 4


def test_published_generation_cannot_have_been_without_a_cache() -> None:
    """1,024 rows, 1,024 new tokens, 1,536 tokens before each on average, 2 FLOP for each of 6.6e9 weights, in
    2,097,152 / 727 s on 8 GPUs of 312 TFLOP/s: 2.96 times their peak, and a little more for attention."""
    by_hand = 1024 * 1024 * 1536 * 2 * 6.6e9 / (2_097_152 / 727) / (8 * 312e12)
    share = uncached_share_of_peak(Prediction("7B", 8, "nemo", None, 727.0))
    assert share == pytest.approx(by_hand, rel=0.06)
    for (model, gpus, system), figure in published().items():
        if system == "nemo":
            assert uncached_share_of_peak(Prediction(model, gpus, system, None, figure)) > 1.3


def test_errors_are_means_over_what_is_published_and_fits() -> None:
    found = [
        Prediction("7B", 8, "hflow", 110.0, 100.0),
        Prediction("7B", 16, "hflow", 70.0, 100.0),
        Prediction("7B", 64, "hflow", 70.0, None),
        Prediction("7B", 8, "dschat", None, 100.0),
    ]
    assert report(found)["mape"] == {"hflow": 20.0}
    assert report(found)["predictions"][0]["error"] == 0.1


def test_what_published_figures_lose_is_told() -> None:
    found = [
        Prediction("7B", 8, "dschat", 7000.0, 1750.0),
        Prediction("7B", 16, "dschat", 12_000.0, 3600.0),
        Prediction("7B", 8, "openrlhf", 2600.0, 2300.0),
        Prediction("7B", 96, "openrlhf", 24_600.0, None),
    ]
    assert list(notes(found)) == [
        "dschat: published are 25% to 30% of what its plan allows on these engines",
        "[96] GPUs do not divide an update's 128 rows: fixed plans leave some idle",
    ]


def test_hybridflows_planner_predicts_what_hybridflow_measured() -> None:
    """Figure 9, up to 32 GPUs. Nothing is fitted to it."""
    for model, gpus in (("7B", 8), ("7B", 16), ("7B", 32), ("13B", 16), ("13B", 32), ("34B", 32)):
        (found,) = predictions(model, gpus, ["hybridflow"])
        assert found.published == published()[model, gpus, "hybridflow"]
        assert found.error is not None and abs(found.error) < 0.15


def test_an_engine_wakes_up_as_fast_as_its_memory_comes_back() -> None:
    """Two GPUs share 32 GB/s, of which 0.8 is reached; each has half of 6.7 billion weights of two bytes."""
    shape, mesh = NAMED_SHAPES["llama-7b"], Mesh.of((0, 1), tp=2)
    seconds = wake_up_s(shape, mesh, 20 * 10**9, load_cluster("a100x8"))
    assert seconds == pytest.approx((6_738_415_616 + 20e9) / (16e9 * 0.8), rel=1e-3)


def test_planners_are_compared_where_both_find_a_plan() -> None:
    ours, theirs = Planned(100.0, 0.5, 0.0, 7), Planned(130.0, 0.2, None, 90)
    found = [
        Case("ppo", "7B", 8, ours, theirs, 11.2),
        Case("ppo", "34B", 16, Planned(500.0, 1.5, 0.02, 3), None, None),
    ]
    line = compared(found)
    assert line["ratio"] == {"min": 1.3, "median": 1.3, "geometric_mean": 1.3, "max": 1.3}
    assert line["exact_planning_s"]["max"] == 1.5 and line["gaps"] == 1
    assert line["figure_16_by_exact"]["min"] == 22.4
    assert line["cases"][1]["ratio"] is None
