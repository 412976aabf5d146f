"""What generates: who chooses it, and what a plan makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import hflow
from hflow.compiler.cheapest_engine import cheapest
from hflow.compiler.compile import new_draft
from hflow.compiler.engines import engine_choices
from hflow.compiler.options import DEFAULTS
from hflow.compiler.passes.candidates import candidates
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.planner.search_space import SearchSpace
from hflow.cost.activation_memory import kv_cache_bytes
from hflow.cost.host_memory import host_memory
from hflow.cost.resident_memory import resident_bytes
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster, Link
from hflow.plan.cluster_file import load_cluster
from hflow.plan.cluster_text import cluster_text
from hflow.plan.edges import WeightEdge
from hflow.plan.engines.sglang import SERVER_PROFILE
from hflow.plan.frozen import moved_parameters
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import num_parameters
from hflow.plan.plan import Plan, Search
from hflow.plan.program import Await, Call, Release, SyncWeights
from hflow.plan.verify.consistency import inconsistencies
from hflow.plan.verify.runnable import unrunnable
from hflow.plan.workload import workload
from hflow.view.terminal.terminal import plan_text
from tests.compiler.test_planner import agrees
from tests.compiler.workloads import ROOT, large, settings

COLOCATED = "actor_train=tp2,dp4@0-7", "rollout=tp2,dp4@0-7"


def served(name: str) -> Cluster:
    return replace(load_cluster(name), generate_engine="sglang")


def planned(
    graph: Graph, cluster: Cluster, *pins: str, engines: tuple[str, ...] = ("rollout=sglang",)
) -> Plan:
    return hflow.compile(graph, cluster, pins, engines=engines)


@pytest.fixture(scope="module")
def grpo() -> Graph:
    return large("grpo", "llama-7b")


def test_the_user_goes_before_the_cluster(grpo: Graph) -> None:
    assert engine_choices((), grpo, load_cluster("a100x8")) == ({"rollout": "megatron"},)
    assert engine_choices((), grpo, served("a100x8")) == ({"rollout": "sglang"},)
    assert engine_choices(("rollout=megatron",), grpo, served("a100x8")) == ({"rollout": "megatron"},)


def test_a_cluster_file_may_say_it(tmp_path: Path) -> None:
    text = Path("clusters/local.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(f"{text}\nengines: {{generate: sglang}}\n")
    assert load_cluster(tmp_path / "mine.yaml").generate_engine == "sglang"
    (tmp_path / "mine.yaml").write_text(f"{text}\nengines: {{generate: vllm}}\n")
    with pytest.raises(HflowError, match="HF301.*`engines.generate`"):
        load_cluster(tmp_path / "mine.yaml")


def test_every_bad_choice_is_told(grpo: Graph) -> None:
    with pytest.raises(HflowError) as caught:
        engine_choices(("rolout=sglang", "actor_train=sglang", "rollout=vllm"), grpo, load_cluster("local"))
    assert [d.code for d in caught.value.diagnostics] == ["HF310"] * 3
    assert "did you mean `rollout`" in str(caught.value)


def test_auto_takes_the_engine_with_the_shorter_step(grpo: Graph) -> None:
    """Rows that end early are replaced at once on SGLang alone: it is sooner where lengths vary and rows wait
    for their turn, and where all are equally long it only has to be given the weights."""
    varied = large("grpo", "llama-7b", "nodes.rollout.lengths={mean: 64}")
    pins = "rollout=dp8,micro16@0-7", "actor_train=tp2,dp4@0-7"
    for graph, best in ((grpo, "megatron"), (varied, "sglang")):
        alone = {
            engine: planned(graph, load_cluster("a100x8"), *pins, engines=(f"rollout={engine}",))
            for engine in ("megatron", "sglang")
        }
        auto = planned(graph, load_cluster("a100x8"), *pins, engines=("rollout=auto",))
        steps = {engine: plan.step_time_s for engine, plan in alone.items()}
        assert auto.step_time_s == min(steps.values()) == steps[best]
        assert auto.node("rollout").engine == best and auto.hash == alone[best].hash
        assert {dict(t.engines)["rollout"]: t.step_time_s for t in auto.search.tried_engines} == steps
        assert auto.search.explored == sum(plan.search.explored for plan in alone.values())
        assert auto.search.bound_s == min(plan.search.bound_s for plan in alone.values())


def test_a_cluster_may_leave_the_engine_open(grpo: Graph, tmp_path: Path) -> None:
    cluster = replace(load_cluster("a100x8"), generate_engine="auto")
    (tmp_path / "mine.yaml").write_text(cluster_text(cluster))
    assert load_cluster(tmp_path / "mine.yaml") == cluster
    assert engine_choices((), grpo, cluster) == ({"rollout": "megatron"}, {"rollout": "sglang"})
    assert engine_choices(("rollout=sglang",), grpo, cluster) == ({"rollout": "sglang"},)
    remax = large("remax", "llama-7b")
    assert len(engine_choices((), remax, cluster)) == 2, "both nodes sample with one model"


def test_auto_proves_no_more_than_its_searches(grpo: Graph) -> None:
    """Nothing, if one of them proves nothing; and nothing of plans that an engine could not run."""
    plans = {
        engine: planned(grpo, load_cluster("a100x8"), *COLOCATED, engines=(f"rollout={engine}",))
        for engine in ("megatron", "sglang")
    }
    choices = engine_choices(("rollout=auto",), grpo, load_cluster("a100x8"))
    open_ended = Search(3, None, unsearched=("rollout",), try_pin="rollout=@0-3", searched_gap=0.0)
    given = plans | {"sglang": replace(plans["sglang"], search=open_ended)}
    found = cheapest(choices, lambda engines: given[engines["rollout"]]).search
    assert found.gap is None and found.unsearched == ("rollout",) and found.try_pin == "rollout=@0-3"
    assert found.explored == 3 + plans["megatron"].search.explored
    shortest = min(plan.step_time_s for plan in plans.values())
    gapped = replace(plans["sglang"].search, bound_s=shortest / 2)
    given = plans | {"sglang": replace(plans["sglang"], search=gapped)}
    found = cheapest(choices, lambda engines: given[engines["rollout"]]).search
    assert found.gap == pytest.approx(0.5)


def test_auto_leaves_out_what_cannot_run() -> None:
    """Gemma's layers are none of SGLang's here; and of weights in flight, Megatron knows nothing."""
    gemma = large("grpo", "gemma-2-2b", "nodes.rollout.lengths={mean: 64}")
    pins = "rollout=tp2,dp4,micro16@0-7", "actor_train=tp2,dp4@0-7"
    plan = planned(gemma, load_cluster("h100x8"), *pins, engines=("rollout=auto",))
    assert plan.node("rollout").engine == "megatron"
    (able, unable) = plan.search.tried_engines
    assert (able.step_time_s or 0) > (unable.step_time_s or 0), "it would have been sooner"
    assert not able.reason and "SGLang" in unable.reason
    assert plan.search.gap is None, "another layout might be run, for all that is known"
    assert "rollout on SGLang: " in plan_text(plan, 120)
    flying = large("async_grpo", "llama-7b", IN_FLIGHT)
    assert engine_choices(("rollout=auto",), flying, load_cluster("a100x8")) == ({"rollout": "sglang"},)


def test_a_server_shares_no_weights(grpo: Graph) -> None:
    """In the trainer's own layout nothing travels, and yet the server has to be given the weights."""
    cluster = load_cluster("a100x8")
    own, apart = (
        planned(grpo, cluster, *COLOCATED, engines=(f"rollout={e}",)) for e in ("megatron", "sglang")
    )
    for plan, moved in ((own, False), (apart, True)):
        instructions = [i for i in plan.step.instructions if isinstance(i, SyncWeights)]
        assert bool(instructions) == moved
        (edge,) = (e for e in plan.step.edges if isinstance(e, WeightEdge))
        assert edge.bytes_per_device == 0
        assert (edge.time_s > 0) == moved
    assert apart.node("rollout").engine == "sglang"
    assert own.hash != apart.hash


def test_on_gpus_a_server_sleeps_while_others_run(grpo: Graph) -> None:
    pins = COLOCATED[0], "rollout=tp2,dp4,micro8@0-7", "ref_logprobs=micro1"
    plan = planned(grpo, load_cluster("a100x8"), *pins)
    assert [i.node for i in plan.step.instructions if isinstance(i, Release)] == ["rollout"]
    (memory,) = plan.memory
    assert memory.node == "actor_train"
    assert not any("server" in part for part in memory.parts)
    trained = [part for part in memory.parts if part.startswith("actor")]
    assert len(trained) == 2, "what it trains and what it works with, and no copy of the weights"


def test_a_sleeping_server_keeps_its_context_and_graphs(grpo: Graph) -> None:
    pins = COLOCATED[0], "rollout=tp2,dp4,micro8@0-7", "ref_logprobs=micro1"
    (bare,) = planned(grpo, load_cluster("a100x8"), *pins).memory
    cluster = replace(load_cluster("a100x8"), server_bytes=3 * 10**9)
    (memory,) = planned(grpo, cluster, *pins).memory
    assert memory.node == bare.node == "actor_train"
    assert memory.parts["actor server (dp4 tp2 @0-7)"] == 3 * 10**9
    assert memory.peak_bytes == bare.peak_bytes + 3 * 10**9


def test_on_cpus_a_server_stays_awake(model: str) -> None:
    """Weights, KV cache, processes and the worker's copy of the weights lie there whoever runs."""
    graph = hflow.load("tests/runtime/graphs/grpo_tiny.yaml", [f"params.model={model}"])
    plan = planned(graph, load_cluster("local4"), "actor_train=dp2@0-1", "rollout=dp2@0-1")
    node, shape = plan.node("rollout"), plan.shapes["actor"]
    memory = next(m for m in plan.memory if 0 in m.devices)
    (size,) = (size for part, size in memory.parts.items() if "server" in part)
    tokens = node.micro_batch * workload(graph.node("rollout")).sequence
    cache = kv_cache_bytes(shape, "f32", tokens, node.mesh)
    weights = resident_bytes(shape, "f32", node.mesh, False)
    assert size == weights + cache + SERVER_PROFILE.process_bytes + weights  # the worker's copy


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_server_with_older_weights_evaluates_the_newest(evaluates: bool) -> None:
    """It takes no more of the GPUs. The host keeps both, to give the server its own again."""
    plain = () if evaluates else ("eval=null",)
    graph = large("async_grpo", "llama-7b", *plain)
    cluster = load_cluster("a100x16")
    plan = planned(graph, cluster, "actor_train=tp4,dp2@0-7", "rollout=tp2,dp4,micro8@8-15")
    shape, node = plan.shapes["actor"], plan.node("rollout")
    tokens = node.micro_batch * workload(graph.node("rollout")).sequence
    weights = resident_bytes(shape, "bf16", node.mesh, False)
    (memory,) = (each for each in plan.memory if 8 in each.devices)
    servers = {part: size for part, size in memory.parts.items() if "server" in part}
    assert servers == {
        "actor server (dp4 tp2 @8-15)": weights + kv_cache_bytes(shape, "bf16", tokens, node.mesh)
    }
    kept = host_memory(plan.graphs, plan.shapes, cluster, plan.all_nodes)[1]
    own = {label: size for label, size in kept.items() if "server" in label}
    labels = ["weights", "newest weights"] if evaluates else ["weights"]
    assert own == {f"actor {label} for its server": 8 * weights for label in labels}


def test_a_server_of_an_adapter_stays_awake_with_the_base() -> None:
    """On GPUs, too: no renewal brings the base back."""
    graph = large("grpo", "llama-7b", "models.actor.adapter=16")
    plan = planned(graph, load_cluster("a100x8"), COLOCATED[0], "rollout=tp2,dp4,micro8@0-7")
    assert not [i for i in plan.step.instructions if isinstance(i, Release)]
    (edge,) = (e for e in plan.step.edges if isinstance(e, WeightEdge))
    shape, node = plan.shapes["actor"], plan.node("rollout")
    assert edge.size_bytes == 2 * sum(p.size for p in moved_parameters(shape)) and edge.time_s > 0
    tokens = node.micro_batch * workload(graph.node("rollout")).sequence
    cache = kv_cache_bytes(shape, "bf16", tokens, node.mesh)
    weights = resident_bytes(shape, "bf16", node.mesh, False)
    (memory,) = plan.memory
    assert memory.parts["actor server (dp4 tp2 @0-7)"] == weights + cache


def test_the_worker_has_a_copy_of_the_adapter_alone(model: str) -> None:
    graph = hflow.load("tests/runtime/graphs/adapted.yaml", [f"params.model={model}"])
    plan = planned(graph, load_cluster("local4"), "actor_train=dp2@0-1", "rollout=dp2@0-1")
    node, shape = plan.node("rollout"), plan.shapes["actor"]
    (size,) = (size for part, size in plan.memory[0].parts.items() if "server" in part)
    tokens = node.micro_batch * workload(graph.node("rollout")).sequence
    weights, cache = 4 * num_parameters(shape), kv_cache_bytes(shape, "f32", tokens, node.mesh)
    copy = 4 * sum(p.size for p in moved_parameters(shape))
    assert size == weights + cache + SERVER_PROFILE.process_bytes + copy


def test_a_server_has_as_many_ranks_on_each_of_its_hosts(grpo: Graph) -> None:
    cluster = replace(load_cluster("a100x16"), devices_per_host=2, hosts=3)
    assert planned(grpo, cluster, "rollout=tp4@0-3").node("rollout").mesh.tp == 4
    with pytest.raises(HflowError, match="a server has as many ranks on each of its hosts"):
        planned(grpo, cluster, "rollout=tp4@1-4")
    assert planned(grpo, cluster, "rollout=tp4@1-4", engines=()).node("rollout").mesh.tp == 4


def test_a_server_with_unequal_shares_of_hosts_is_refused(grpo: Graph) -> None:
    """A plan that is found without pins may have one; so may a file."""
    cluster = replace(load_cluster("a100x16"), devices_per_host=2, hosts=3)
    plan = planned(grpo, cluster, "rollout=tp4@0-3")
    own = plan.node("rollout")
    moved = replace(own, mesh=Mesh.of((1, 2, 3, 4), tp=4))
    nodes = tuple(moved if node is own else node for node in plan.nodes)
    told = [problem.message for problem in unrunnable(replace(plan, nodes=nodes))]
    expected = "`rollout` is planned on SGLang with tp4, of which hosts have unequal shares"
    assert expected in told and expected not in [problem.message for problem in unrunnable(plan)]


@pytest.mark.parametrize("engines", [("rollout=sglang",), ()], ids=["sglang", "megatron"])
def test_a_model_that_fits_no_host_generates_over_several(engines: tuple[str, ...]) -> None:
    """Of 138 GB, eight devices would have to hold 17.2 GB each. Training shares it over stages, too."""
    graph = large("grpo", "llama-70b")
    cluster = load_cluster("h100x128")
    pins = ["ref_logprobs=pp8,dp2,tp8@0-127", "actor_train=pp8,dp2,tp8,zero1,sp@0-127"]
    small = replace(cluster, device=replace(cluster.device, memory_bytes=17 * 10**9, reserve_bytes=0))
    assert planned(graph, small, *pins, engines=engines).node("rollout").mesh.tp == 16
    assert planned(graph, cluster, *pins, engines=engines).node("rollout").mesh.tp <= 8


def test_a_server_is_not_offloaded() -> None:
    """Weights of a frozen model can be, on Megatron; elsewhere such a pin would be without effect."""
    overrides = ["params.model=shape:llama-7b", "nodes.greedy.model=ref"]
    files = ["tests/runtime/graphs/greedy_twice.yaml"]
    graph = hflow.load("tests/runtime/graphs/grpo_tiny.yaml", overrides, files)
    cluster, pin = load_cluster("a100x8"), "greedy=offload,dp4@0-3"
    assert planned(graph, cluster, pin, engines=()).node("greedy").offload
    with pytest.raises(HflowError, match="a server is not offloaded"):
        planned(graph, cluster, pin, engines=("greedy=sglang",))


def test_what_does_not_fit_beside_a_server_says_why(model: str) -> None:
    """There is room for one server, which samples with older weights and evaluates the newest."""
    graph = hflow.load("algorithms/async_grpo.yaml", [f"params.model={model}"])
    cluster = load_cluster("local1")
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=1_700_000_000))
    planned(graph, cluster)
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=1_001_000_000))
    with pytest.raises(HflowError, match="HF305") as caught:
        planned(graph, cluster)
    assert "server" in str(caught.value) and "without  there" not in str(caught.value)


@pytest.mark.slow
def test_two_engines_for_one_model_are_two_copies(model: str) -> None:
    overrides = [f"params.model={model}"]
    files = ["tests/runtime/graphs/greedy_twice.yaml"]
    graph = hflow.load("tests/runtime/graphs/grpo_tiny.yaml", overrides, files)
    plan = planned(graph, load_cluster("local4"), engines=("rollout=sglang", "greedy=sglang"))
    readers = [i.node for i in plan.step.instructions if isinstance(i, SyncWeights)]
    assert len([name for name in readers if name in ("rollout", "greedy")]) == 1
    assert plan.node("rollout").sharding == plan.node("greedy").sharding
    assert plan.node("rollout").sharding != plan.node("greedy_again").sharding


IN_FLIGHT = "nodes.rollout.with.in_flight=true"


def test_weights_in_flight_come_between_the_beginning_and_the_end(model: str) -> None:
    graph = hflow.load("algorithms/async_grpo.yaml", [f"params.model={model}", IN_FLIGHT])
    plan = planned(graph, load_cluster("local4"), "rollout=tp1@3", "actor_train=dp2@0-1")
    shown = (Call, SyncWeights, Await)
    own = [i for i in plan.step.instructions if i.node == "rollout" and isinstance(i, shown)]
    assert [type(i) for i in own] == [*shown]
    call, _, await_ = own
    assert isinstance(call, Call) and not call.outputs and call.time_s > 0
    assert isinstance(await_, Await) and await_.outputs
    plain = planned(
        hflow.load("algorithms/async_grpo.yaml", [f"params.model={model}"]),
        load_cluster("local4"), "rollout=tp1@3", "actor_train=dp2@0-1",
    )  # fmt: skip
    assert plan.step_time_s == pytest.approx(plain.step_time_s, rel=0.05), (
        "training takes longer than sampling"
    )
    assert "weights reach rollout while it samples" in plan_text(plan)
    assert not list(inconsistencies(plan))
    for missing, complaint in ((call, "which nothing has called"), (await_, "nothing waits for it")):
        left = tuple(replace(i, after=()) for i in plan.step.instructions if i != missing)
        broken = replace(plan, step=replace(plan.step, instructions=left))
        assert any(complaint in problem for problem in inconsistencies(broken))
    with pytest.raises(HflowError, match=r"HF310.*`rollout`"):
        planned(graph, load_cluster("local4"), engines=())


def test_new_weights_wake_a_server_that_slept(grpo: Graph) -> None:
    """Once in a step, in the plan as in the search, which proves that no other plan is shorter."""
    cluster = load_cluster("a100x8")
    slow = replace(cluster, wake=Link(10e9, 5.0))
    seconds = 5.0 + num_parameters(NAMED_SHAPES["llama-7b"]) * 2 / 10e9
    for pins in (COLOCATED, ()):
        soon, late = planned(grpo, cluster, *pins), planned(grpo, slow, *pins)
        (sync,), (before,) = (
            [i for i in plan.step.instructions if isinstance(i, SyncWeights)] for plan in (late, soon)
        )
        assert sync.time_s == pytest.approx(before.time_s + seconds)
        assert late.step_time_s == pytest.approx(soon.step_time_s + seconds)
        assert late.search.gap == soon.search.gap == 0
        assert not list(inconsistencies(late))
    assert soon.hash == planned(grpo, cluster).hash != late.hash


def test_a_server_with_older_weights_need_not_wake() -> None:
    graph, cluster = large("async_grpo", "llama-7b"), load_cluster("a100x8")
    late = planned(graph, replace(cluster, wake=Link(10e9, 5.0)))
    assert late.step_time_s == planned(graph, cluster).step_time_s


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "algorithm", ["ppo", "grpo", "async_grpo", "in_flight", "dapo", "tool_grpo", "on_policy_distillation"]
)
@pytest.mark.parametrize(("cluster", "server_gb"), [("a100x16", 0), ("a100x16", 4), ("local4", 0)])
def test_the_planner_and_the_passes_agree(algorithm: str, cluster: str, server_gb: int, model: str) -> None:
    """The time of a step, and that it fits."""
    in_flight = algorithm == "in_flight"
    graph = large("async_grpo", "llama-7b", IN_FLIGHT) if in_flight else large(algorithm, "llama-7b")
    wake = Link(10e9, 5.0) if server_gb else None
    machines = replace(served(cluster), server_bytes=server_gb * 10**9, wake=wake)
    if cluster == "local4":
        machines = replace(machines, device=replace(machines.device, memory_bytes=10**12))
    draft = candidates(weight_edges(new_draft(graph, machines, (), replace(DEFAULTS, budget_s=0.0))))
    agrees(draft, SearchSpace(draft), budget_s=0.0)


def test_sglang_splits_only_the_vocabularies_that_it_cuts_as_hflow_does(tmp_path: Path) -> None:
    """It rounds others up before it cuts them (HF406 in a plan by hand); pins to them are refused."""
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11008, "vocab_size": 32002, "max_position_embeddings": 4096, "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    graph = hflow.load(ROOT / "algorithms/grpo.yaml", [*settings("grpo", ""), f"params.model={tmp_path}"])
    plan = planned(graph, served("h100x8"))
    assert plan.node("rollout").mesh.tp == 1 and not unrunnable(plan)
    assert planned(graph, served("h100x8"), "rollout=tp2,dp4", engines=("rollout=megatron",))
    with pytest.raises(HflowError, match="the 32002 tokens are no multiple of 64"):
        planned(graph, served("h100x8"), "rollout=tp2,dp4")
