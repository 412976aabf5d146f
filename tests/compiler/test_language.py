"""Programs of graphs with carried values, regions, older weights, refreshed models and ordered trainings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import hflow
from hflow.compiler.compile import compile_graph
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.layout import Replicate
from hflow.plan.parameters import num_parameters
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.plan.ports import input_layout
from hflow.plan.program import Call, Free, Instruction, Loop, SyncWeights, handles_read, handles_written
from hflow.plan.replicas import Instance
from hflow.plan.sharding import Sharding
from tests.compiler.programs import program_text
from tests.compiler.test_compile import local

GRAPHS = Path("tests/runtime/graphs")
NAMES = ("carried", "region", "lagged", "refreshed", "trained_twice", "pairs")
PINS = {
    "carried": ("actor_train=dp2@0-1", "ref_logprobs=pp2@2-3"),
    "region": ("rollout=tp2@2-3", "actor_train=dp2@0-1"),
    "lagged": ("rollout=dp2@0-1", "actor_train=dp2@0-1"),
    "refreshed": ("ref_logprobs=tp2@2-3", "actor_logprobs=tp2@0-1", "actor_train=dp2@0-1"),
    "trained_twice": ("again=dp2@0-1",),
    "pairs": ("actor_train=dp3@0-2", "ref_logprobs=tp2@0-1"),
}


def load(name: str, model: str, *overrides: str) -> Graph:
    return hflow.load(GRAPHS / f"{name}.yaml", [f"params.model={model}", *overrides])


def compiled(name: str, model: str, pins: Sequence[str] | None = None, *overrides: str) -> Plan:
    return compile_graph(load(name, model, *overrides), local(4), PINS[name] if pins is None else pins)


def codes(action: Callable[[], object]) -> tuple[str, str]:
    """Code of the first diagnostic, and its message and help."""
    with pytest.raises(HflowError) as caught:
        action()
    first = caught.value.diagnostics[0]
    return first.code, f"{first.message}; {first.help}"


@pytest.mark.parametrize("name", NAMES)
def test_program_text_is_golden(golden: Callable[[str, str], None], model: str, name: str) -> None:
    plan = compiled(name, model)
    texts = [program_text(p) for p in (plan.step, plan.evaluation) if p]
    golden(f"compiler/program_{name}.txt", "\n\n".join(texts))


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trip(model: str, tmp_path: Path, name: str) -> None:
    plan = compiled(name, model)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("name", NAMES)
def test_every_handle_is_written_before_it_is_read_and_freed_once(model: str, name: str) -> None:
    plan = compiled(name, model)
    for program in (p for p in (plan.step, plan.evaluation) if p):
        for instructions in _lists(program.instructions):
            alive: set[str] = set()
            for instruction in instructions:
                assert set(handles_read(instruction)) <= alive
                alive -= set(instruction.handles) if isinstance(instruction, Free) else set()
                alive |= set(handles_written(instruction))
            assert not alive


def _lists(instructions: Sequence[Instruction]) -> Iterator[Sequence[Instruction]]:
    yield instructions
    for instruction in instructions:
        if isinstance(instruction, Loop):
            yield from _lists(instruction.body)


def test_a_body_edited_by_hand_is_checked(model: str, tmp_path: Path) -> None:
    plan = compiled("region", model)
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    (number,) = (i for i, made in enumerate(data["step"]["instructions"]) if made["op"] == "loop")
    data["step"]["instructions"][number]["body"].pop(0)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    code, message = codes(lambda: load_plan(tmp_path / "plan.json"))
    assert code == "HF306" and f"instruction {number}.0 reads" in message


def test_whole_batches_and_scalars_lie_on_all_devices(model: str) -> None:
    plan = compiled("carried", model)
    node = plan.graph.node("sum")
    for value in node.inputs:
        layout = input_layout(node, plan.node("sum").mesh, value.type)
        assert layout.placements == (Replicate(), Replicate(), Replicate())
    scaled = plan.graph.node("scaled")
    value, factor = (input_layout(scaled, plan.node("scaled").mesh, v.type) for v in scaled.inputs)
    assert value.placements != factor.placements


def test_cutting_what_lies_everywhere_copies_nothing(model: str) -> None:
    """Outputs of a region lie whole on its devices; a training on these devices takes its rows from there."""
    plan = compiled("region", model, ("rollout=dp2@0-1", "actor_train=dp2@0-1"))
    (edge,) = (e for e in plan.step.edges if (e.source, e.target) == ("sampling", "actor_train"))
    assert (edge.copies, edge.bytes_per_device, edge.collective) == ((), 0, "alias")


def test_rounds_count_in_the_predicted_time(model: str) -> None:
    """Rounds of six rows: twelve take two rounds at least."""
    one, two = (compiled("region", model, None, f"params.rows={rows}") for rows in (6, 12))
    assert two.node("rollout").time_s == pytest.approx(2 * one.node("rollout").time_s)
    assert two.tokens_per_step == 2 * one.tokens_per_step
    assert two.step_time_s > one.step_time_s + one.node("rollout").time_s * 0.99


def test_older_weights_are_a_copy_that_memory_counts(model: str) -> None:
    lagging, on_policy = (compiled("lagged", model, None, f"params.lag={lag}") for lag in (1, 0))
    size = 4 * num_parameters(lagging.shapes["actor"])
    with_copy, without = lagging.memory[0], on_policy.memory[0]
    snapshot = size // 2  # of each replica, for a checkpoint
    assert with_copy.parts["actor older weights, snapshot (dp2 @0-1)"] == size + snapshot
    assert with_copy.peak_bytes - without.peak_bytes == size + snapshot
    assert not [i for i in on_policy.step.instructions if isinstance(i, SyncWeights)]


def test_older_weights_are_renewed_just_before_training(model: str) -> None:
    plan = compiled("lagged", model)
    told = [(i.op, i.node) for i in plan.step.instructions]
    assert told.index(("weights", "rollout")) > told.index(("call", "rollout"))
    assert told.index(("weights", "rollout")) < told.index(("call", "actor_train"))
    assert plan.evaluation and not [i for i in plan.evaluation.instructions if isinstance(i, SyncWeights)]


def test_nodes_of_different_lag_have_different_weights(model: str) -> None:
    from hflow.plan.replicas import instances

    graph = load("lagged", model)
    mesh = compiled("lagged", model).node("rollout").mesh
    found = instances([graph], {n.name: Sharding(mesh) for n in graph.nodes})
    assert set(found) == {Instance("actor", Sharding(mesh), 1), Instance("actor", Sharding(mesh), 0)}
    assert found[Instance("actor", Sharding(mesh))] == graph.node("actor_train")
    assert found[Instance("actor", Sharding(mesh), 1)] is None


def test_two_updates_old_is_not_scheduled(model: str) -> None:
    graph = load("lagged", model, "params.lag=1")
    nodes = [replace(n, model=replace(n.model, lag=2)) if n.model and n.model.lag else n for n in graph.nodes]
    code, message = codes(lambda: compile_graph(replace(graph, nodes=tuple(nodes)), local(2)))
    assert code == "HF307" and "`rollout` may read weights 2 updates old" in message


def test_reading_after_training_is_not_scheduled(model: str) -> None:
    graph = load("refreshed", model)
    late = replace(graph.node("actor_logprobs"), after=("actor_train",))
    order = ("texts", "ref_logprobs", "actor_train", "actor_logprobs")
    nodes = [late if name == "actor_logprobs" else graph.node(name) for name in order]
    code, message = codes(lambda: compile_graph(replace(graph, nodes=tuple(nodes)), local(2)))
    assert code == "HF307" and "`actor_logprobs` reads `actor` after `actor_train`" in message


def test_a_refreshed_model_must_have_the_shape_of_its_source(model: str) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    Path("other").mkdir()
    (Path("other") / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    graph = load("refreshed", model, "params.ref=other")
    code, message = codes(lambda: compile_graph(graph, local(2)))
    assert code == "HF226" and "`ref` takes over the weights of `actor`" in message


def test_trainings_of_one_model_share_its_mesh(model: str) -> None:
    plan = compiled("trained_twice", model)
    assert plan.node("first").mesh == plan.node("again").mesh
    calls = [i.node for i in plan.step.instructions if isinstance(i, Call)]
    assert calls == ["texts", "first", "again"]


@pytest.mark.parametrize("pins", [("first=tp2@0-1", "again=dp2@0-1"), ("first=@0-1", "again=@2-3")])
def test_pins_of_trainings_that_disagree(model: str, pins: tuple[str, ...]) -> None:
    code, message = codes(lambda: compiled("trained_twice", model, pins))
    assert code == "HF302" and "which they share" in message and all(pin in message for pin in pins)


def test_pins_of_trainings_that_agree(model: str) -> None:
    plan = compiled("trained_twice", model, ("first=tp2", "again=@2-3"))
    assert str(plan.node("first").mesh) == str(plan.node("again").mesh) == "tp2 @2-3"


def test_groups_are_not_parted(model: str) -> None:
    """Six rows per update are three pairs: they split over three devices, or stay on one."""
    plan = compiled("pairs", model, ("actor_train=tp1@0",))
    assert plan.node("actor_train").micro_batch % 2 == 0
    assert compiled("pairs", model, ("actor_train=dp3@0-2",)).node("actor_train").micro_batch == 2
    code, message = codes(lambda: compiled("pairs", model, ("actor_train=dp2@0-1",)))
    assert code == "HF302" and "whole groups of 2" in message
