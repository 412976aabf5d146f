"""Scaled graphs are what the graph's file says with other params."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph, Node
from hflow.graph.load import load
from hflow.graph.scaled import with_batch, with_responses

FILES = {path.stem: path for path in sorted(Path("algorithms").glob("*.yaml"))}
# files that write out a minibatch of all rows
WHOLE = {"remax": 512, "online_dpo": 256, "on_policy_distillation": 512, "reinforce_pp": 512, "rloo": 512}
ROLLOUT = ("nodes.rollout.lengths.mean=2", "nodes.rollout.lengths.p90=4", "nodes.prompts.lengths.mean=5")
FUNCTION = """
from hflow.ops.op import op


@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def same(text, answer):
    return [[float(one == want) for one in texts] for texts, want in zip(text, answer)]
"""


def modelled(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.model]


def told(name: str, *params: str) -> Graph:
    return load(FILES[name], [f"params.{param}" for param in params])


@pytest.mark.parametrize("name", FILES)
def test_a_batch_is_the_params(name: str) -> None:
    graph = load(FILES[name])
    params = [f"{key}={2 * graph.params[key]}" for key in ("batch", "draw") if key in graph.params]
    if name in WHOLE:
        params.append(f"minibatch={2 * WHOLE[name]}")
    assert params and with_batch(graph, 2).nodes == told(name, *params).nodes


@pytest.mark.parametrize("name", [name for name in FILES if "max_new_tokens" in load(FILES[name]).params])
def test_responses_are_the_params(name: str) -> None:
    graph = load(FILES[name])
    half = told(name, f"max_new_tokens={graph.params['max_new_tokens'] // 2}")
    found = with_responses(graph, 0.5)
    assert modelled(found) == modelled(half)
    assert found != graph and found.regions == graph.regions


def test_stated_lengths_are_scaled_and_those_of_prompts_stay() -> None:
    found = with_responses(load(FILES["grpo"], ROLLOUT), 0.5)
    halved = "params.max_new_tokens=2", "nodes.rollout.lengths.mean=1", "nodes.rollout.lengths.p90=2"
    assert modelled(found) == modelled(load(FILES["grpo"], [*halved, ROLLOUT[-1]]))
    assert found.node("prompts") == load(FILES["grpo"], ROLLOUT).node("prompts")


def test_an_odd_length_is_rounded_up_and_holds_what_is_stated() -> None:
    graph = load(FILES["grpo"], ["params.max_new_tokens=5", "nodes.rollout.lengths.p100=5"])
    rollout = with_responses(graph, 0.5).node("rollout")
    assert rollout.options["max_new_tokens"] == 3
    assert rollout.lengths and rollout.lengths.longest == 2.5


def test_regions_collect_as_many_times_more() -> None:
    graph = load(FILES["dapo"])
    old, new = graph.regions[1], with_batch(graph, 3).regions[1]
    assert new == replace(old, rows=3 * old.rows) and old.until


def test_functions_in_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTION)
    (tmp_path / "own.yaml").write_text(
        f"extends: {Path('algorithms/grpo.yaml').absolute()}\nhflow: 1\nname: own\n"
        "nodes: {reward: {fn: './own.py:same'}}\n"
    )
    graph = load(tmp_path / "own.yaml")
    found = with_batch(graph, 2).node("reward").function
    assert found and found == graph.node("reward").function


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(HflowError, match=r"HF\d+.*9223372036854775808"):
        with_batch(load(FILES["grpo"]), 2**56)
