"""The options of node groups against brute force: which layouts divide, which ways to run are worth
keeping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

import hflow
import hflow.compiler.candidates.pricing as pricing
from hflow.compiler.candidates.node_groups import Candidate, NodeGroup, ParetoFront, node_groups
from hflow.compiler.compile import new_draft
from hflow.compiler.passes.candidates import candidates
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.planner.search import search
from hflow.compiler.state import Draft
from hflow.cost.comm import reached
from hflow.cost.compute import node_time_s
from hflow.cost.resident_memory import optimizer_bytes, resident_bytes
from hflow.cost.working_memory import working_bytes
from hflow.diagnostics import HflowError
from hflow.graph.ir import Node
from hflow.plan.cluster_file import load_cluster
from hflow.plan.workload import workload
from tests.compiler.small_cases import case, space_of
from tests.compiler.workloads import large

SIZES = (1, 2, 4, 8, 16)  # divisors of a host of 8, and whole hosts


@pytest.fixture(scope="module")
def draft() -> Draft:
    return candidates(weight_edges(new_draft(large("ppo", "llama-7b"), load_cluster("a100x16"))))


def options(draft: Draft) -> Iterator[tuple[NodeGroup, Candidate]]:
    for group in node_groups(draft.graph, draft.engines, draft.evaluation_graph):
        for each in draft.candidates[group.name].values():
            yield from ((group, candidate) for candidate in each)


def test_layouts_are_all_that_divide(draft: Draft) -> None:
    """32 layers, 32 heads, 1,024 rows and minibatches of 128: with memory enough, all powers of two with tp
    inside a host; generation without pp."""
    kind = replace(draft.cluster.device, memory_bytes=10**15)
    roomy = candidates(replace(draft, cluster=replace(draft.cluster, device=kind, name="roomy")))
    for group in node_groups(draft.graph, draft.engines, draft.evaluation_graph):
        found = {(o.pp, o.dp, o.tp) for each in roomy.candidates[group.name].values() for o in each}
        pps = (1,) if group.role == "generate" else (1, 2, 4, 8, 16)
        expected = {
            (pp, n // (pp * tp), tp) for n in SIZES for pp in pps for tp in (1, 2, 4, 8) if n % (pp * tp) == 0
        }
        assert found == expected, group.name


@pytest.mark.parametrize(
    ("name", "tps"),
    [
        ("qwen3-30b-a3b", {1, 2, 4, 8}),
        ("qwen2.5-3b", {1, 2, 4, 8}),
        ("qwen2.5-1.5b", {1, 2, 4}),
        ("phi-4", {1, 2}),
    ],
)
def test_ranks_may_share_heads_of_keys_and_values(name: str, tps: set[int]) -> None:
    """Of 4, 2, 2 and 10: their number is a multiple of that of ranks, or a divisor, and ranks divide the 32,
    16, 12 and 40 heads of queries."""
    graph = hflow.load("algorithms/grpo.yaml", [f"params.model=shape:{name}"])
    found = candidates(weight_edges(new_draft(graph, load_cluster("h100x8"))))
    for group in node_groups(found.graph, found.engines, found.evaluation_graph):
        assert {c.tp for each in found.candidates[group.name].values() for c in each} == tps, group.name


def test_devices_get_whole_groups_of_rows_and_equally_many() -> None:
    """The samples of a prompt stay together but where they are generated: 4 prompts are for 4 data-parallel
    ranks at most."""
    sizes = ["params.batch=4", "params.group=16", "nodes.actor_train.repeat.minibatch=64"]
    graph = hflow.load("algorithms/grpo.yaml", ["params.model=shape:qwen2.5-0.5b", *sizes])
    found = candidates(weight_edges(new_draft(graph, load_cluster("h100x8"))))
    for group in node_groups(found.graph, found.engines, found.evaluation_graph):
        dps = {candidate.dp for each in found.candidates[group.name].values() for candidate in each}
        assert dps == ({1, 2, 4, 8} if group.role == "generate" else {1, 2, 4}), group.name
    with pytest.raises(HflowError, match="(?s)HF302.*dp8 does not divide 4 groups of 16 rows"):
        hflow.compile(graph, "h100x8", "ref_logprobs=dp8")


def test_every_way_fits_and_none_is_beaten(draft: Draft) -> None:
    capacity = draft.cluster.device.usable_bytes
    for group, candidate in options(draft):
        for node, configs in zip(group.nodes, candidate.fronts):
            assert all(w.need_bytes + candidate.idle_bytes <= capacity for w in configs.configs)
            for less, more in pairwise(configs.configs):
                assert less.need_bytes < more.need_bytes and less.time_s > more.time_s
            _check_against_all(draft, group, candidate, node, configs)


def test_what_stays_and_what_is_swapped(draft: Draft) -> None:
    """Offload moves the optimizer's state there and back, and drops the gradients; a frozen model's weights
    come only one way."""
    assert draft.cluster.host_link
    link = reached(draft.cluster, draft.cluster.host_link)
    for group, candidate in options(draft):
        what = draft.shapes[group.model], "bf16", candidate.mesh(0)
        weights, state = (resident_bytes(*what, trained, candidate.strategy) for trained in (False, True))
        if group.role in ("generate", "score"):
            expected = (0, weights, 0, 0.0)
        elif not candidate.offload:
            expected = (state if group.role == "train" else weights, 0, 0, 0.0)
        elif group.role == "train":
            moved = 2 * optimizer_bytes(*what, candidate.strategy)
            expected = (weights, 0, state - weights, moved / link.bandwidth + 2 * link.latency_s)
        else:
            expected = (0, 0, weights, weights / link.bandwidth + link.latency_s)
        found = (
            candidate.idle_bytes,
            candidate.kept.copy_bytes,
            candidate.kept.swapped_bytes,
            candidate.swap_s,
        )
        assert found == pytest.approx(expected), (group.name, candidate)


@pytest.mark.parametrize("name", ["ppo", "grpo", "async_grpo"])
def test_beaten_options_are_not_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the options that another one beats in every respect the best step is as short as with them."""
    for seed in range(200, 206):
        kept = replace(case(name, seed, 10**9), pins=())
        kept = candidates(kept)
        with monkeypatch.context() as patch:
            patch.setattr(pricing, "_undominated", list)
            full = candidates(kept)
        assert _num_options(full) >= _num_options(kept)
        best, best_of_all = (search(space_of(d), 20.0, resolution=0.0).choice for d in (kept, full))
        assert (best is None) == (best_of_all is None)
        if best and best_of_all:
            assert best.step_s == pytest.approx(best_of_all.step_s, rel=1e-3)


def _num_options(draft: Draft) -> int:
    return sum(len(each) for own in draft.candidates.values() for each in own.values())


def _check_against_all(
    draft: Draft, group: NodeGroup, candidate: Candidate, node: Node, configs: ParetoFront
) -> None:
    """No micro-batch of a power of two, with or without recomputation, is better than the ways kept."""
    shape, mesh, work = draft.shapes[group.model], candidate.mesh(0), workload(node)
    extra = candidate.kept.swapped_bytes
    for recompute in ("none", "full") if node.op == "train" else ("none",):
        strategy = replace(candidate.strategy, recompute=recompute)
        share = (work.rows_per_update or work.rows) // mesh.dp
        for micro in (2**i for i in range(share.bit_length())):
            need = working_bytes(node.op, shape, "bf16", work, mesh, micro, strategy) + extra
            fast = configs.fastest(need)
            if need + candidate.idle_bytes <= draft.cluster.device.usable_bytes:
                seconds = node_time_s(node.op, shape, "bf16", work, mesh, micro, draft.cluster, strategy)
                assert fast and fast.time_s <= seconds
