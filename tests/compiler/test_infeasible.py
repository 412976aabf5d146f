"""What is said when nothing fits: the least memory against brute force, the smallest cluster by compiling."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hflow
from hflow.compiler.compile import compile_graph
from hflow.compiler.explain.min_memory import min_memory
from hflow.compiler.options import Planner, PlannerOptions
from hflow.compiler.passes.place import place
from hflow.compiler.planner import widening
from hflow.compiler.planner.search import exhaustive
from hflow.diagnostics import Diagnostic, HflowError, render
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import num_parameters
from hflow.plan.program import Onload
from tests.compiler.small_cases import case, scarce_case, space_of, with_memory
from tests.compiler.workloads import large

GRAPHS = ("ppo", "remax", "async_grpo", "trained_twice", "iterative_grpo")


def refusal(graph: Graph, cluster: Cluster, *pins: str, options: PlannerOptions | None = None) -> Diagnostic:
    with pytest.raises(HflowError) as caught:
        compile_graph(graph, cluster, pins, options or PlannerOptions())
    (found,) = caught.value.diagnostics
    return found


def cluster(name: str, hosts: int = 1, memory_gb: float = 80.0, link: bool = True) -> Cluster:
    """A100s of which all memory may be filled but a tenth."""
    shipped = load_cluster(name)
    memory = int(memory_gb * 1e9)
    device = replace(shipped.device, memory_bytes=memory, reserve_bytes=memory // 10)
    host_link = shipped.host_link if link else None
    return replace(shipped, hosts=hosts, device=device, host_link=host_link)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_the_least_memory_is_that_of_some_plan_and_of_none_less(name: str) -> None:
    """A plan fits if and only if the one that needs the least memory does: tried on all plans of problems in
    which memory is scarce."""
    for seed in range(12):
        space = space_of(case(name, seed, 1000))
        if space.pinned:
            continue
        lean = min_memory(space)
        fits = lean is not None and lean.fullest.peak_bytes <= space.draft.cluster.device.usable_bytes
        assert fits == (exhaustive(space).choice is not None), seed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "grpo", "safe_rlhf", "dapo", "remax"])
def test_the_least_memory_is_no_byte_too_much_or_too_little(name: str) -> None:
    for seed in range(6):
        draft = scarce_case(name, seed, 1000)
        lean = None if draft.pins else min_memory(space_of(draft))
        if lean is None:
            continue
        enough = lean.fullest.peak_bytes
        found = [exhaustive(space_of(with_memory(draft, size))).choice for size in (enough, enough - 1)]
        assert found[0] and not found[1], seed


@pytest.mark.slow
def test_ppo_of_70b_on_one_host_is_refused_with_the_smallest_cluster_that_works() -> None:
    """18 bytes for each of its parameters, on eight devices; HybridFlow's smallest run of it is on 64."""
    graph = large("ppo", "llama-70b")
    found = refusal(graph, cluster("a100x8"))
    state = num_parameters(NAMED_SHAPES["llama-70b"]) * 18 / 8e9
    assert found.code == "HF305" and "8 A100-80G with 72.0 GB each" in found.message
    assert f"actor weights, gradients, Adam (tp8 sp offload) {state:.1f} GB" in found.help
    assert found.help.endswith("it fits on 24 devices (3 hosts of 8 A100-80G)")
    assert found.span and found.span.file.endswith("ppo.yaml")
    assert refusal(graph, cluster("a100x8", hosts=2)).code == "HF305"
    assert compile_graph(graph, cluster("a100x8", hosts=3)).step_time_s > 0


def test_a_search_that_ended_too_soon_does_not_say_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model's nodes in several places less memory is enough than with each model in one place."""
    draft = scarce_case("async_grpo", 3, 1000)
    lean = min_memory(space_of(draft))
    assert lean
    scarce = with_memory(draft, int(0.9 * lean.fullest.peak_bytes))
    assert place(scarce).nodes
    monkeypatch.setattr(widening, "FITTING", 0)
    with pytest.raises(HflowError) as caught:
        place(scarce)
    (found,) = caught.value.diagnostics
    assert found.code == "HF305" and found.message.startswith("found no plan of `async_grpo` that fits")
    assert "--budget 60 goes on for as many seconds" in found.help
    assert "with each model in one place, some device needs" in found.help


@pytest.mark.slow
def test_what_exceeds_all_memory_together_is_proven_not_to_fit() -> None:
    """Safe-RLHF has more node groups than are tried in places of their own; these keep too much in any."""
    found = refusal(large("safe_rlhf", "llama-7b"), cluster("a100x8", memory_gb=40.0, link=False))
    assert found.code == "HF305" and found.message.startswith("no plan of `safe_rlhf` fits")


@pytest.mark.slow
def test_parts_add_up_to_what_is_needed() -> None:
    found = refusal(large("ppo", "llama-34b"), cluster("a100x8", link=False)).help
    needs, _, parts = found.partition(";")[0].partition(" runs:\n")
    total = float(needs.split("some device needs ")[1].split()[0])
    sizes = [float(part.split()[-2]) for part in parts.split("\n+ ")]
    assert len(sizes) == 5 and total == pytest.approx(sum(sizes), abs=0.05 * len(sizes))


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_the_smallest_cluster_lies_between_powers_of_two() -> None:
    graph = large("safe_rlhf", "llama-70b")
    found = refusal(graph, cluster("a100x8", hosts=8, memory_gb=78, link=False)).help
    assert "it fits if models may wait in the host's memory" in found
    assert found.endswith("it fits on 72 devices (9 hosts of 8 A100-80G)")
    quick = PlannerOptions(budget_s=0.0)
    for hosts, link in ((9, False), (8, True)):
        enough = cluster("a100x8", hosts=hosts, memory_gb=78, link=link)
        assert compile_graph(graph, enough, options=quick).step_time_s > 0


@pytest.mark.slow
def test_no_cluster_is_large_enough_for_what_does_not_split() -> None:
    found = refusal(large("grpo", "qwen2.5-0.5b"), cluster("a100x8", memory_gb=0.3)).help
    assert "only shorter sequences need less" in found
    assert found.endswith("nor does such a plan fit on 512 of these devices")


def test_what_restricts_the_search_is_named() -> None:
    options = PlannerOptions(placement="standalone")
    found = refusal(large("ppo", "llama-13b"), cluster("a100x8", link=False), options=options)
    assert (found.code, found.help) == ("HF305", "without --placement standalone there are plans that fit")
    pins = "actor_train=no-offload", "critic_train=no-offload"
    found = refusal(large("ppo", "llama-34b"), cluster("a100x16", hosts=2), *pins)
    assert found.code == "HF305" and all(f"--pin {pin}" in found.help for pin in pins)


@pytest.mark.parametrize("planner", ["exact", "exhaustive", "hybridflow"])
def test_one_model_cannot_be_split(planner: Planner) -> None:
    """It would fit: not the memory is in the way."""
    options = PlannerOptions(placement="split", planner=planner)
    found = refusal(large("sft", "llama-7b"), cluster("a100x8"), options=options)
    assert (found.code, found.help) == ("HF309", "leave it out")
    assert found.message == "--placement split needs two models, and `sft` has only `actor`"


def test_a_placement_needs_devices() -> None:
    found = refusal(
        large("grpo", "llama-7b"),
        replace(cluster("a100x8"), devices_per_host=1),
        options=PlannerOptions(placement="standalone"),
    )
    assert (found.code, found.help) == ("HF309", "leave it out")
    assert found.message == "--placement standalone needs 2 devices; `a100x8` has 1"


def test_a_pinned_model_is_not_split_from_the_others() -> None:
    found = refusal(
        large("grpo", "llama-7b"),
        cluster("a100x8"),
        "ref_logprobs=@0-3",
        options=PlannerOptions(placement="split"),
    )
    assert found.code == "HF309" and "two models that are not pinned to devices" in found.message


def test_lines_of_the_help_begin_below_each_other() -> None:
    found = refusal(large("ppo", "llama-70b"), cluster("a100x8"))
    lines = render(found).splitlines()
    start = lines[2].index("with each model")
    assert all(line[:start].isspace() and len(line) < 110 for line in lines[3:])
    assert lines[-1][start:].startswith("it fits on")


@pytest.mark.slow
def test_a_plan_that_needs_offload_says_what_it_costs() -> None:
    """PPO of 34B runs on 32 devices in HybridFlow's evaluation; on 16 only with offload."""
    graph = large("ppo", "llama-34b")
    assert refusal(graph, cluster("a100x16", hosts=2, link=False)).code == "HF305"
    plan = hflow.compile(graph, "a100x16")
    moved = [i for i in plan.step.instructions if isinstance(i, Onload) and i.node == "actor_train"]
    assert plan.node("actor_train").offload and moved[0].time_s > 0


def test_where_all_models_are_pinned_memory_is_what_lacks() -> None:
    """Not models that could be put apart, of which there is then none. Older weights stay beside new ones."""
    graph = large("async_grpo", "llama-7b")
    trainer = [f"{node.name}=@0-3" for node in graph.nodes if node.model and node.name != "rollout"]
    found = refusal(graph, cluster("a100x8", memory_gb=37.0), *trainer, "rollout=dp4@4-7")
    assert found.code == "HF305" and "fits into the memory of `a100x8`" in found.message


def test_a_pin_of_devices_is_not_told_of_others() -> None:
    found = refusal(large("sft", "llama-34b"), cluster("a100x8", hosts=2), "actor_train=@8-15")
    assert found.code == "HF302" and "pp2 tp4: needs " in found.help and "@0-7" not in found.help


def test_a_pinned_layout_tells_how_much_it_lacks() -> None:
    """7B parameters with 18 bytes each on one device."""
    graph = large("sft", "llama-7b")
    found = refusal(graph, cluster("a100x8"), "actor_train=dp8,zero0")
    needs = num_parameters(NAMED_SHAPES["llama-7b"]) * 18 / 1e9
    size = float(found.help.removeprefix("dp8: needs ").split()[0])
    assert found.code == "HF302" and found.help.endswith("of 72.0 GB") and needs < size < needs + 20
