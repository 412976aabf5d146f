"""What fails in a worker points into the graph file, and bad data fail before anything has been done."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import hflow
from hflow.diagnostics import Diagnostic, HflowError, Span
from hflow.runtime.controller.pool import Pool
from hflow.runtime.controller.worker_failure import root_cause
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.execute import execute
from hflow.runtime.worker.failure import Failure, failure_of
from hflow.runtime.worker.world import Aborted

GRAPH = Path(__file__).parent / "grpo_small.yaml"
PINS = ("rollout=dp2", "ref_logprobs=dp2", "actor_train=dp2")
ALONE = ("local1", ())


def fail(
    pool: Pool,
    folder: Path,
    model: Path,
    edits: dict[str, str],
    functions: str,
    layout: tuple[str, tuple[str, ...]] = ("local", PINS),
) -> tuple[Diagnostic, Path]:
    """The diagnostic of a run of grpo_small.yaml, edited, and its folder."""
    (folder / "rewards.py").write_text(functions)
    text = GRAPH.read_text()
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "graph.yaml").write_text(text)
    plan = hflow.compile(hflow.load(folder / "graph.yaml", [f"params.model={model}"]), *layout)
    with pytest.raises(HflowError) as caught:
        execute(plan, folder / "run", pool=pool, export=False)
    return caught.value.diagnostics[0], folder / "run"


@pytest.fixture
def functions() -> str:
    return (GRAPH.parent / "rewards.py").read_text()


def line_of(folder: Path, node: str) -> int:
    return (folder / "graph.yaml").read_text().splitlines().index(f"  {node}:") + 1


def test_bad_data_are_told_before_the_first_step(
    workers: Pool, tmp_path: Path, tiny_model: Path, functions: str
) -> None:
    edits = {"{{ question }}": "{{ quesiton }}"}
    found, run = fail(workers, tmp_path, tiny_model, edits, functions)
    assert found.code == "HF403" and "node `prompts` failed" in found.message
    assert found.help == "did you mean `question`?"
    assert found.span and Path(found.span.file) == tmp_path / "graph.yaml"
    assert found.span.line == line_of(tmp_path, "prompts")
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events == ["started", "placed", "failed"]


def test_a_failing_function_is_told_with_its_node(workers: Pool, tmp_path: Path, tiny_model: Path) -> None:
    functions = """
from hflow.ops.op import op

@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def digits(text, answer):
    raise ZeroDivisionError("no such reward")
"""
    found, run = fail(workers, tmp_path, tiny_model, {}, functions)
    assert found.code == "HF401" and "ZeroDivisionError: no such reward" in found.message
    assert found.span and found.span.line == line_of(tmp_path, "reward")
    assert 'raise ZeroDivisionError("no such reward")' in (run / "error.txt").read_text()


@pytest.mark.parametrize("layout", [ALONE, ("local", PINS), ("local", (*PINS[:2], "actor_train=tp2"))])
def test_a_learning_rate_that_ruins_the_weights_is_told_by_node_step_and_weight(
    workers: Pool, tmp_path: Path, tiny_model: Path, functions: str, layout: Any
) -> None:
    """On one worker and on two; not as what sampling from NaN leads to."""
    edits = {"lr: 1e-3}": "lr: 1e30}"}
    found, _ = fail(workers, tmp_path, tiny_model, edits, functions, layout)
    assert found.code == "HF405" and "node `actor_train` failed on worker" in found.message
    assert "step 0: after update 0, of learning rate 1e+30; weight `model." in found.message
    assert found.span and found.span.line == line_of(tmp_path, "actor_train")


@pytest.mark.parametrize("layout", [ALONE, ("local", PINS)])
def test_a_model_with_a_weight_that_is_no_number_is_named_before_the_first_step(
    workers: Pool, tmp_path: Path, tiny_model: Path, functions: str, layout: Any
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    found, run = fail(workers, tmp_path, model, {}, functions, layout)
    assert found.code == "HF406"
    assert f"`{model}/model.safetensors`: tensor `model.norm.weight` holds nan at [3]" in found.message
    assert not (run / "metrics.jsonl").read_text()


HERE, THERE = Span("graph.yaml", 3, 1, 5), Span("data.jsonl", 7, 1, 2)


def test_the_best_known_place_is_told() -> None:
    bad_row = Diagnostic("HF403", "no field", THERE, "add it")
    wrapped = NodeError("prompts", "flattened")
    wrapped.__cause__ = HflowError(bad_row)
    assert failure_of(wrapped, "", lambda node: HERE).diagnostic == bad_row
    placeless = failure_of(NodeError("rollout", "too long"), "", {"rollout": HERE}.get)
    assert placeless.diagnostic == Diagnostic("HF401", "too long", HERE)
    assert failure_of(KeyError("x"), "reward", {"rollout": HERE}.get).diagnostic.span is None


def test_failures_survive_the_way_and_consequences_come_last() -> None:
    reports = [
        {"error": failure_of(Aborted(), "rollout", lambda node: None)},
        {"error": Failure(Diagnostic("HF402", "the worker process died"))},
        {"error": Failure(Diagnostic("HF401", "Connection closed by peer"), "train")},
        {},
        {"error": Failure(Diagnostic("HF405", "loss is nan", HERE, "lower lr"), "train", "trace")},
    ]
    cause = root_cause(pickle.loads(pickle.dumps(reports)))
    expected = Diagnostic("HF405", "node `train` failed on worker 4: loss is nan", HERE, "lower lr")
    assert (cause.diagnostics, cause.trace) == ((expected,), "trace")
    assert root_cause(reports[:3]).diagnostics[0].code == "HF402"
