"""A plan is made where the data are not, with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.graph.load import load_text
from hflow.plan.missing_data import missing_data

GRAPH = """\
hflow: 1
extends: algorithms/grpo.yaml
name: absent
eval: null
nodes:
  prompts: {with: {dataset: PATH, size: null, options: null, holdout: 0, prompt: "{{ question }}"}}
"""


def graph_of(path: str) -> hflow.Graph:
    return load_text(GRAPH.replace("PATH", path), "absent.yaml")


@pytest.mark.parametrize("path", ["gone.jsonl", "gone/*.parquet", "./gone"])
def test_what_is_not_there_is_told(path: str) -> None:
    (warning,) = missing_data(graph_of(path))
    assert (warning.code, warning.severity) == ("HF403", "warning") and f"`{path}`" in warning.message
    assert warning.span and warning.span.line == 6


def test_what_is_there_and_what_is_elsewhere_is_not(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    for path in (f"{tmp_path}/rows.jsonl", f'"{tmp_path}/*.jsonl"', f"{tmp_path}/", "openai/gsm8k"):
        assert missing_data(graph_of(path)) == (), path
    assert missing_data(hflow.load("algorithms/grpo.yaml")) == ()


def test_the_data_of_an_evaluation_is_looked_for() -> None:
    text = GRAPH.replace("PATH", "[a.jsonl, b.jsonl]").replace("eval: null", EVALUATIONS)
    told = [warning.message for warning in missing_data(load_text(text, "absent.yaml"))]
    assert [message.split("`")[3] for message in told] == ["a.jsonl", "b.jsonl", "c.jsonl"]


EVALUATIONS = """\
eval: null
evaluations:
  test: {rows: 4, data: {dataset: c.jsonl}, metrics: {right: reward.score}}"""
