"""Models that read one another's tokens have one vocabulary."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.plan.vocabulary import token_ids
from hflow.runtime.tools.new_model import new_model

SMALL = ["params.batch=4", "params.minibatch=4", "params.holdout=4"]


def model(folder: Path, alphabet: str, head: str = "lm") -> Path:
    new_model(folder, layers=1, hidden=16, heads=2, ffn=16, alphabet=alphabet, head=head)  # type: ignore[arg-type]
    return folder


def test_a_judge_with_other_tokens_is_refused(tmp_path: Path) -> None:
    actor = model(tmp_path / "actor", "0123456789+-=")
    judges = {
        "same": model(tmp_path / "same", "0123456789+-=", "scalar"),
        "reordered": model(tmp_path / "reordered", "=-+9876543210", "scalar"),
        "larger": model(tmp_path / "larger", "0123456789+-=abcdefghijklmnop", "scalar"),
    }
    for name, folder in judges.items():
        given = [f"params.model={actor}", f"params.reward_model={folder}", *SMALL]
        graph = hflow.load("algorithms/ppo.yaml", given)
        if name == "same":
            assert hflow.compile(graph, "local1").nodes
            continue
        with pytest.raises(HflowError) as caught:
            hflow.compile(graph, "local1")
        (problem,) = caught.value.diagnostics
        assert problem.code == "HF308" and "`reward`" in problem.message and "`actor`" in problem.message
        assert problem.span and problem.span.file == "algorithms/ppo.yaml"


def test_an_evaluation_that_reads_other_tokens_is_refused(tmp_path: Path) -> None:
    actor, other = model(tmp_path / "actor", "0123456789+-="), model(tmp_path / "other", "=-+9876543210")
    file, given = tmp_path / "graph.yaml", [f"params.model={actor}", *SMALL]
    file.write_text(f"""\
hflow: 1
extends: grpo
name: evaluated
params: {{tokenizer: actor}}
models:
  other: {{path: "{other}", frozen: true}}
evaluations:
  test:
    rows: 4
    data: {{dataset: x.jsonl, tokenizer: "${{ tokenizer }}"}}
    metrics: {{length: {{length: rollout}}}}
nodes:
  prompts: {{with: {{tokenizer: actor}}}}
""")
    for tokenizer in ("actor", "other"):
        graph = hflow.load(file, [*given, f"params.tokenizer={tokenizer}"])
        if tokenizer == "actor":
            assert hflow.compile(graph, "local1").nodes
            continue
        with pytest.raises(HflowError) as caught:
            hflow.compile(graph, "local1")
        (problem,) = caught.value.diagnostics
        assert problem.code == "HF308" and "`rollout@test`" in problem.message


def test_a_token_without_a_row_in_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "actor", "0123456789+-= .ab")
    graph = hflow.load("algorithms/sft.yaml", [f"params.model={folder}", "params.batch=4"])
    assert hflow.compile(graph, "local1").nodes
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 32', '"vocab_size": 17'))
    with pytest.raises(HflowError) as caught:
        hflow.compile(graph, "local1")
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF303" and problem.span == graph.model("actor").span
    assert "token '<reserved-11>' has id 31, and the embedding 17 rows" in problem.message


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "3", "{}", '{"model": 3}', '{"model": {"vocab": 5}}', '{"model": {"vocab": [3]}}'),
        *(
            '{"model": {"vocab": [[]]}}',
            '{"model": {"vocab": {"a": "b"}}}',
            '{"model": {"vocab": [[{}, 1]]}}',
        ),
        *('{"model": {"vocab": {}}, "added_tokens": [3]}', '{"model": {"vocab": {}}, "added_tokens": [{}]}'),
        *(
            '{"model": {"vocab": {}}, "added_tokens": 7}',
            "[" * 100_000,
            '{"model": {"vocab": {"\\ud800": 1}}}',
        ),
    ],
)
def test_a_vocabulary_that_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    """Whether the tokenizer can be used is told when it is loaded."""
    (tmp_path / "tokenizer.json").write_text(text)
    assert token_ids(str(tmp_path)) is None


def test_a_vocabulary_of_scored_pieces_is_numbered_in_order(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"content": "<c>", "id": 7}]}'
    )
    assert token_ids(str(tmp_path)) == {"a": 0, "b": 1, "<c>": 7}


def test_a_pipe_in_place_of_a_vocabulary_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    assert token_ids(str(tmp_path)) is None
