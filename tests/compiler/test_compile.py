"""The whole compiler on the GRPO graph: plans, programs, pins and what it refuses."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.compiler.compile import compile_graph
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.edges import WeightEdge
from hflow.plan.layout import Mesh
from hflow.plan.plan import Plan, to_json
from hflow.plan.plan_file import load_plan
from hflow.plan.program import Call, Free, SyncWeights, Transfer, handles_read, handles_written
from hflow.view.terminal.terminal import plan_text
from tests.compiler.programs import program_text

Golden = Callable[[str, str], None]

PINS = ("actor_train=tp2,dp2", "rollout=dp4", "ref_logprobs=pp2,tp2")


def local(devices: int) -> Cluster:
    return replace(load_cluster(Path("clusters/local.yaml")), devices_per_host=devices)


@pytest.mark.parametrize(
    ("name", "devices", "pins"), [("grpo_local", 2, ()), ("grpo_local4_pinned", 4, PINS), ("grpo_8", 8, ())]
)
def test_plan_text_is_golden(
    golden: Golden, grpo: Graph, name: str, devices: int, pins: tuple[str, ...]
) -> None:
    golden(f"compiler/{name}.txt", plan_text(compile_graph(grpo, local(devices), pins)))


def test_program_text_is_golden(golden: Golden, grpo: Graph) -> None:
    """Every instruction of a pinned plan: what is called, what moves, what is freed."""
    plan = compile_graph(grpo, local(4), PINS)
    assert plan.evaluation
    golden("compiler/grpo_program.txt", f"{program_text(plan.step)}\n\n{program_text(plan.evaluation)}\n")


def test_a_text_is_one_and_a_choice_must_exist(grpo: Graph) -> None:
    """In Python; on the command line the parser sees to it."""
    plan = hflow.compile(grpo, "local4", "actor_train=tp2,dp2")
    assert plan.hash == hflow.compile(grpo, "local4", ["actor_train=tp2,dp2"]).hash
    assert hflow.load("algorithms/grpo.yaml", "params.steps=3").steps == 3
    for wrong, meant in ({"placement": "splitt"}, "split"), ({"planner": "exakt"}, "exact"):
        with pytest.raises(HflowError, match=f"(?s)HF309.*did you mean `{meant}`"):
            hflow.compile(grpo, "local4", **wrong)
    with pytest.raises(TypeError, match="no graph: hflow.load reads one"):
        hflow.compile("algorithms/grpo.yaml", "local4")  # type: ignore[arg-type]


def test_same_inputs_same_bytes(grpo: Graph, model: str) -> None:
    again = hflow.load("algorithms/grpo.yaml", [f"params.model={model}"])
    assert to_json(compile_graph(grpo, local(4))) == to_json(compile_graph(again, local(4)))


def test_json_round_trip_and_hash(grpo: Graph, tmp_path: Path) -> None:
    plan = compile_graph(grpo, local(4), PINS)
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan and again.hash == plan.hash
    other = compile_graph(grpo, local(4), ("rollout=tp2,dp2",))
    assert other.hash != plan.hash


def test_hash_ignores_where_the_file_lies(grpo: Graph, model: str, tmp_path: Path) -> None:
    (tmp_path / "copy.yaml").write_text("\n# moved\n" + Path("algorithms/grpo.yaml").read_text())
    moved = hflow.load(tmp_path / "copy.yaml", [f"params.model={model}"])
    assert compile_graph(moved, local(2)).hash == compile_graph(grpo, local(2)).hash


def test_every_handle_is_written_before_it_is_read_and_freed_once(grpo: Graph) -> None:
    plan = compile_graph(grpo, local(4), PINS)
    for program in (plan.step, plan.evaluation):
        assert program
        alive: set[str] = set()
        for instruction in program.instructions:
            assert set(handles_read(instruction)) <= alive
            if isinstance(instruction, Free):
                alive -= set(instruction.handles)
            alive |= set(handles_written(instruction))
        assert not alive


def test_models_are_read_before_they_are_trained(grpo: Graph) -> None:
    calls = [i.node for i in compile_graph(grpo, local(4), PINS).step.instructions if isinstance(i, Call)]
    assert calls.index("rollout") < calls.index("actor_train")
    assert len(calls) == len(set(calls)) == 6


def test_evaluation_is_greedy_on_held_out_rows(grpo: Graph) -> None:
    plan = compile_graph(grpo, local(2))
    assert plan.evaluation
    rollout = plan.evaluation.graph.node("rollout")
    assert (rollout.options["n"], rollout.options["temperature"], rollout.rows) == (1, 0.0, 512)
    assert {n.name for n in plan.evaluation.graph.nodes} == {"prompts", "rollout", "reward"}


def test_generation_mesh_is_regrouped(grpo: Graph) -> None:
    plan = compile_graph(grpo, local(8), ("actor_train=tp4,dp2", "rollout=tp2,dp4"))
    assert plan.node("rollout").mesh == Mesh.of((0, 2, 1, 3, 4, 6, 5, 7), dp=4, tp=2)
    edge = next(e for e in plan.step.edges if isinstance(e, WeightEdge))
    assert edge.bytes_per_device == edge.lower_bound_bytes_per_device


def test_equal_meshes_move_nothing(grpo: Graph) -> None:
    plan = compile_graph(grpo, local(2))
    assert {e.collective for e in plan.step.edges} == {"alias"}
    assert not [i for i in plan.step.instructions if isinstance(i, Transfer | SyncWeights)]


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("rollot=tp2", "no node `rollot`"),
        ("rollout", "not of the form"),
        ("rollout=zp2", "`zp2` is no size"),
        ("rollout=tp2,tp4", "`tp` is given twice"),
        ("rollout=tp2@0-9", "there is no device 9"),
        ("rollout=tp2@0,0", "twice"),
        ("rollout=tp2@1,0", "not ascending"),
        ("reward=dp2", "runs where its values lie"),
        ("rollout=pp2,dp2@0-3", "cannot run so"),
        ("actor_train=tp3@0-2", "cannot run so"),
        ("actor_train=tp2,dp2@0-2", "cannot run so"),
    ],
)
def test_bad_pins(grpo: Graph, pin: str, message: str) -> None:
    with pytest.raises(HflowError) as caught:
        compile_graph(grpo, local(4), (pin,))
    assert [d.code for d in caught.value.diagnostics] == ["HF302"]
    assert message in caught.value.diagnostics[0].message + caught.value.diagnostics[0].help


def test_all_bad_pins_at_once(grpo: Graph) -> None:
    with pytest.raises(HflowError) as caught:
        compile_graph(grpo, local(4), ("nope=tp2", "rollout=", "actor_train=dp2@7"))
    assert len(caught.value.diagnostics) == 3


def test_too_small_memory_is_refused(grpo: Graph) -> None:
    cluster = local(2)
    tiny = replace(cluster, device=replace(cluster.device, memory_bytes=1_000_000))
    with pytest.raises(HflowError) as caught:
        compile_graph(grpo, tiny)
    assert {d.code for d in caught.value.diagnostics} <= {"HF304", "HF305"}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan["nodes"][0].update(node="renamed"), "node `prompts` has no plan"),
        (lambda plan: plan["nodes"][1].update(micro_batch=0), "micro-batch of 0"),
        (lambda plan: plan["step"]["instructions"].pop(0), "which nothing wrote"),
        (lambda plan: plan["step"]["instructions"][1].update(edge=99), "edge 99"),
        (lambda plan: plan.update(version=0), "plan version 0"),
        (lambda plan: plan.pop("cluster"), "cluster"),
    ],
)
def test_a_plan_edited_by_hand_is_checked(grpo: Graph, tmp_path: Path, edit: Any, message: str) -> None:
    plan = json.loads(to_json(compile_graph(grpo, local(4), PINS)))
    edit(plan)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(HflowError) as caught:
        load_plan(tmp_path / "plan.json")
    assert [d.code for d in caught.value.diagnostics] == ["HF306"]
    assert message in caught.value.diagnostics[0].message


@pytest.mark.parametrize("text", ["", "[1]", "hflow: 1", '"plan"'])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(HflowError, match="HF306"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", "3"), ("hidden_size", 0), ("model_type", "gpt2"), ("num_attention_heads", None)],
)
def test_a_broken_config_is_refused(model: str, key: str, value: Any) -> None:
    file = Path(model) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(HflowError) as caught:
        hflow.compile(hflow.load("algorithms/sft.yaml", [f"params.model={model}"]), "local")
    assert [d.code for d in caught.value.diagnostics] == ["HF303"]


def test_a_graph_without_models_is_refused(model: str, tmp_path: Path) -> None:
    graph = "hflow: 1\nname: data\nloop: {name: step, times: 1}\nnodes:\n  rows:\n    op: data\n"
    graph += "    with: {dataset: x.jsonl, batch: 2}\n    out: {answer: 'str[batch]'}\n"
    (tmp_path / "data.yaml").write_text(graph)
    with pytest.raises(HflowError, match="HF304"):
        hflow.compile(hflow.load(tmp_path / "data.yaml"), "local")


@pytest.mark.parametrize("cluster", ["local", "local4"])
def test_responses_longer_than_the_model_are_refused(model: str, cluster: str) -> None:
    """For that reason, and not since some layout that has nothing to do with it is none of generation."""
    graph = hflow.load("algorithms/grpo.yaml", [f"params.model={model}", "params.max_new_tokens=512"])
    with pytest.raises(HflowError) as caught:
        hflow.compile(graph, cluster)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "HF304" and "`actor` has 512 positions" in diagnostic.message
    assert "max_new_tokens" in diagnostic.help and "pipeline" not in str(caught.value)
    assert diagnostic.span == graph.node("rollout").span


def test_fewer_devices_only_when_more_do_not_work(model: str) -> None:
    overrides = [f"params.model={model}", "params.batch=12", "params.minibatch=96"]
    plan = compile_graph(hflow.load("algorithms/grpo.yaml", overrides), local(4))
    assert all(len(n.mesh.devices) == 4 for n in plan.nodes)


def test_missing_model_names_its_place(tmp_path: Path, model: str) -> None:
    graph = hflow.load("algorithms/grpo.yaml", ["params.model=nowhere"])
    with pytest.raises(HflowError) as caught:
        compile_graph(graph, local(2))
    assert [d.code for d in caught.value.diagnostics] == ["HF303", "HF303"]  # actor and ref
    assert all(d.span and d.span.line > 1 for d in caught.value.diagnostics)


def test_prime_batches_use_fewer_devices(model: str) -> None:
    """7 prompts do not split over 2 devices in any way but tensor parallelism; over 4 likewise."""
    overrides = [f"params.model={model}", "params.batch=7", "params.minibatch=56", "params.holdout=8"]
    plan = compile_graph(hflow.load("algorithms/grpo.yaml", overrides), local(2))
    assert plan.node("rollout").mesh.dp == 1


def test_compiling_is_quick(grpo: Graph) -> None:
    """Not a benchmark: a planner that explodes would take minutes."""
    started = time.perf_counter()
    plan = compile_graph(grpo, local(64))
    assert isinstance(plan, Plan) and time.perf_counter() - started < 30


def test_models_that_are_not_there_are_proposed_with_seeds_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed would make a cost model that is the reward model."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HflowError) as caught:
        compile_graph(hflow.load("safe_rlhf"), load_cluster("local"))
    folders = {d.message: d.help for d in caught.value.diagnostics}
    commands = [re.findall(r"`(hflow new-model .*)`", help_)[0] for help_ in folders.values()]
    assert sorted(set(commands)) == [
        "hflow new-model models/tiny",
        "hflow new-model models/tiny_cost --head scalar --seed 2",
        "hflow new-model models/tiny_reward --head scalar --seed 1",
    ]
