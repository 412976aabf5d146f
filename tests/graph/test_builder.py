"""The builder and the YAML printer: every graph that one makes, the other says, and the loader reads back."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.builder import builder
from hflow.graph.builder.builder import GraphBuilder
from hflow.graph.builder.builder_values import ModelHandle, NodeHandle
from hflow.graph.ir import Graph
from hflow.graph.load import load, load_text
from hflow.graph.source.document import parse
from hflow.graph.source.yaml_text import flow, quoted, scalar
from hflow.graph.write.formatter import format_text
from hflow.graph.write.printer import ir
from hflow.graph.write.yaml_printer import to_yaml
from hflow.ops.advantages import group_normalise
from hflow.ops.op import op

ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
PROMPTS = {"tokens": "i32[batch, prompt~]", "answer": "str[batch]"}


def assert_round_trip(graph: Graph) -> None:
    text = to_yaml(graph)
    again = load_text(text)
    assert again == graph
    assert ir(again) == ir(graph)
    assert to_yaml(again) == text
    assert format_text(text) == text


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_algorithms_round_trip(path: Path) -> None:
    assert_round_trip(load(path))


def test_the_builder_says_what_a_file_says() -> None:
    g = hflow.GraphBuilder(
        "grpo",
        doc="Group Relative Policy Optimization, arXiv:2402.03300",
        params=dict(load("algorithms/grpo.yaml").params),
        steps="${ steps }",
    )
    actor = g.model("actor", path="${ model }")
    ref = g.model("ref", path="${ model }", frozen=True)
    prompts = g.data(
        "prompts",
        out=PROMPTS,
        dataset="reasoning-gym/basic_arithmetic",
        size=8192,
        options={
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 2,
            "max_digits": 2,
            "operators": ["+"],
            "allow_parentheses": False,
            "allow_negation": False,
        },
        batch="${ batch }",
        holdout="${ holdout }",
        prompt="{{ metadata.expression | replace(' ', '') }}=",
        max_prompt_tokens=8,
    )
    rollout = g.generate(
        "rollout", model=actor, prompt=prompts.tokens, n="${ group }", max_new_tokens="${ max_new_tokens }"
    )
    reward = g.call("reward", "hflow.ops.rewards.exact_match", text=rollout.text, answer=prompts.answer)
    reference = g.score("ref_logprobs", model=ref, tokens=rollout.tokens)
    advantages = g.call("advantages", group_normalise, score=reward.score)
    g.train(
        "actor_train",
        model=actor,
        loss="hflow.ops.losses.ppo_clip",
        tokens=rollout.tokens,
        old_logprobs=rollout.logprobs,
        ref_logprobs=reference.logprobs,
        advantages=advantages.advantages,
        epochs=1,
        minibatch="${ minibatch }",
        lr="${ lr }",
        clip="${ clip }",
        kl_coef="${ kl_coef }",
        aggregate="sequence_mean",
    )
    g.evaluate(reward.score, rows="${ holdout }")
    assert g.graph() == load("algorithms/grpo.yaml")
    assert parse(g.yaml(), "x").plain() == parse(Path("algorithms/grpo.yaml").read_text(), "x").plain()
    assert format_text(g.yaml()) == g.yaml()


def test_the_example_of_the_builder() -> None:
    done = doctest.testmod(builder)
    assert done.attempted and not done.failed


def small() -> tuple[GraphBuilder, ModelHandle, NodeHandle]:
    g = GraphBuilder("small", steps=3)
    actor = g.model("actor", path="models/tiny")
    prompts = g.data("prompts", out=PROMPTS, dataset="d.jsonl", batch=4, prompt="{{ question }}")
    return g, actor, g.generate("rollout", model=actor, prompt=prompts.tokens, n=2, max_new_tokens=8)


def problems(g: GraphBuilder) -> list[tuple[str, str, int]]:
    """Code, file and line of everything that is wrong."""
    with pytest.raises(HflowError) as caught:
        g.graph()
    return [(d.code, d.span.file, d.span.line) for d in caught.value.diagnostics if d.span]


def test_problems_are_shown_where_the_call_stands() -> None:
    g, actor, rollout = small()
    here = sys._getframe().f_lineno
    g.score("again", model=actor, tokens=rollout.tokenz)
    g.score(
        "twice",
        model="actr",
        tokens=rollout.tokens,
    )
    assert problems(g) == [
        ("HF201", "tests/graph/test_builder.py", here + 1),
        ("HF202", "tests/graph/test_builder.py", here + 2),
    ]


def test_names_are_given_once_and_values_fit_a_file() -> None:
    g, actor, rollout = small()
    here = sys._getframe().f_lineno
    g.model("actor", path="models/other")
    g.score("s", model=actor, tokens=rollout.tokens, temperature={1, 2})
    assert [(code, line) for code, _, line in problems(g)] == [("HF003", here + 1), ("HF103", here + 2)]


def test_half_a_character_does_not_fit_a_file() -> None:
    here = sys._getframe().f_lineno
    g = GraphBuilder("small", steps=3, doc="\ud800", params={"\udfff": 1})
    g.model("actor", path="models/\udc80")
    assert [(code, line) for code, _, line in problems(g)] == [
        ("HF103", line) for line in (here + 1, here + 1)
    ] + [("HF103", here + 2)]


@op("text: str[rows] -> score: f32[rows]")
def length(text: Any) -> Any:
    raise AssertionError("checking a graph runs no function")


def test_a_function_may_be_given_itself() -> None:
    g, _, rollout = small()
    g.call("a", group_normalise, score=g.call("b", length, text=rollout.text).score)
    functions = {n.name: n.function.reference for n in g.graph().nodes if n.function}
    assert functions["a"] == "hflow.ops.advantages.group_normalise"
    assert functions["b"] in ("tests.graph.test_builder.length", "./tests/graph/test_builder.py:length")
    g.call("c", small)
    with pytest.raises(HflowError, match=r"HF205\]: function `small` .* has no signature"):
        g.graph()


SCRIPT = """\
import hflow
from hflow.ops.op import op

@op("text: str[rows] -> score: f32[rows]")
def score(text): ...

g = hflow.GraphBuilder("script", steps=1)
actor = g.model("actor", path="models/tiny")
prompts = g.data("prompts", out={"tokens": "i32[batch, prompt~]"}, dataset="d.jsonl", batch=1, prompt="x")
rollout = g.generate("rollout", model=actor, prompt=prompts.tokens, max_new_tokens=8)
g.call("reward", score, text=rollout.text)
assert g.graph() == hflow.graph.load.load_text(g.yaml(), "script.py")
print(g.graph().node("reward").function.reference)
"""


def test_functions_of_a_script_are_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(Path.cwd())}
    )
    assert done.stdout.strip() == "./script.py:score", done.stderr


def test_functions_beside_a_script_are_named_by_their_file(tmp_path: Path) -> None:
    """Nobody but the script finds such a module."""
    imported = SCRIPT.replace('@op("text: str[rows] -> score: f32[rows]")\ndef score(text): ...\n', "")
    (tmp_path / "script.py").write_text(f"from rewards import score\n{imported}")
    (tmp_path / "rewards.py").write_text(SCRIPT[: SCRIPT.index("g = ")])
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert done.stdout.strip() == "./rewards.py:score", done.stderr


def test_functions_of_a_notebook_are_refused() -> None:
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def right(text): ...", "<ipython-input-1-917aeb6074dc>", "exec"), made)
    g, _, rollout = small()
    with pytest.raises(HflowError, match=r"HF205\]: `right` is in no file"):
        g.call("reward", made["right"], text=rollout.text)


def region(g: GraphBuilder, actor: ModelHandle, rows: int, short: str = "fail") -> NodeHandle:
    with g.repeat("sampling", times=8, short=short) as sampling:
        options = {"dataset": "d.jsonl", "batch": 4, "prompt": "{{ question }}", "tokenizer": "actor"}
        drawn = g.data("drawn", out=PROMPTS, holdout=64, **options)
        tried = g.generate("tried", model=actor, prompt=drawn.tokens, n=2, max_new_tokens=8)
        judged = g.call("judged", "hflow.ops.rewards.exact_match", text=tried.text, answer=drawn.answer)
        mixed = g.call("mixed", "hflow.ops.filters.mixed_groups", score=judged.score)
    sampling.until(keep=mixed.keep, rows=rows)
    sampling.out(tokens=tried.tokens, logprobs=tried.logprobs, mask=tried.mask, score=judged.score)
    return sampling


def test_a_region() -> None:
    g, actor, _ = small()
    sampling = region(g, actor, rows=6)
    g.call("advantages", group_normalise, score=sampling.score)
    graph = g.graph()
    assert [n.name for n in graph.inside("sampling")] == ["drawn", "tried", "judged", "mixed"]
    assert graph.region("sampling").rows == 6 and graph.node("advantages").rows == 12
    assert [i.port for i in graph.node("sampling").inputs] == ["keep", "tokens", "logprobs", "mask", "score"]
    assert_round_trip(graph)


def test_what_crosses_steps() -> None:
    g, _, rollout = small()
    cost = g.call("cost", length, text=rollout.text)
    g.call(
        "multiplier",
        "hflow.ops.constraints.lagrange_multiplier",
        cost=cost.score,
        log_multiplier=g.previous("multiplier.log_multiplier", lag=1, init=0.5),
    )
    graph = g.graph()
    carried = graph.node("multiplier").input("log_multiplier")
    assert carried and (carried.lag, carried.init) == (1, 0.5)
    assert "log_multiplier=%multiplier.log_multiplier@-1 init 0.5" in ir(graph)
    assert_round_trip(graph)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """1 to 3 models, several nodes that read what came before, trains in order, perhaps a region and a value
    that crosses steps."""
    g = GraphBuilder(
        draw(st.sampled_from(["a", "some_name"])),
        doc=draw(st.text(st.characters(codec="utf-8"), max_size=20)),
        params=draw(
            st.dictionaries(st.sampled_from("xyz"), st.integers() | st.booleans() | st.text(max_size=5))
        ),
        steps=draw(st.integers(1, 10**6)),
        seed=draw(st.integers(0, 2**63 - 1)),
        loop=draw(st.sampled_from(["step", "loop"])),
    )
    names = ["actor", "critic", "ref"][: draw(st.integers(1, 3))]
    num_trains = draw(st.integers(0, 2))
    refreshed = {"refresh_from": "actor", "refresh_every": 5}
    averaged = {**refreshed, "refresh_decay": 0.5}
    refresh = draw(st.sampled_from([{}, refreshed, averaged])) if num_trains else {}
    actor, *others = [
        g.model(
            name,
            path=draw(st.sampled_from(["models/tiny", "models/tiny", "models/a b"])),
            dtype=draw(st.sampled_from(["f32", "bf16"])),
            head="scalar" if name == "critic" else "lm",
            frozen=name == "ref",
            **(refresh if name == "ref" else {}),
        )
        for name in names
    ]
    prompts = g.data(
        "prompts",
        out=PROMPTS,
        dataset=draw(st.sampled_from(["d.jsonl", "my data.parquet", "reasoning-gym/chain_sum"])),
        batch=draw(st.sampled_from([1, 4, 6])),
        prompt=draw(st.sampled_from(["{{ question }}", 'a "b"\n\t{{ q }} # {c: [d]}', "é\u2028\x7f", "1.0"])),
        holdout=64,
        shuffle=draw(st.booleans()),
        tokenizer=draw(st.sampled_from([actor, "actor"])),
    )
    sampled = [
        (n, f"r{i}") for i, n in enumerate(draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3)))
    ]
    rollouts = [
        g.generate(
            name,
            model=actor,
            lag=draw(st.integers(0, 2)) if num_trains else 0,
            prompt=prompts.tokens,
            n=n,
            max_new_tokens=8,
            temperature=draw(st.sampled_from([1.0, 0.5, 1e-5])),
        )
        for n, name in sampled
    ]
    chosen = draw(st.sampled_from(rollouts))
    for number, model in enumerate(others):
        g.score(f"s{number}", model=model, tokens=draw(st.sampled_from(rollouts)).tokens)
    lag = draw(st.integers(0, 1)) if num_trains else 0
    again = g.score("again", model=actor, lag=lag, tokens=chosen.tokens)
    reward = g.call("reward", length, text=chosen.text, after=draw(st.sampled_from([[], [again], ["again"]])))
    whitened = g.call(
        "advantages",
        "hflow.ops.whitening.whiten_scores",
        score=reward.score,
        eps=draw(st.sampled_from([1e-6, 1e-4])),
    )
    if draw(st.booleans()):
        region(g, actor, draw(st.integers(1, 8)), draw(st.sampled_from(["fail", "fill"])))
    if draw(st.booleans()):
        init = draw(st.sampled_from([0.0, -1.5, 1e-7]))
        before = g.previous("multiplier.log_multiplier", lag=draw(st.integers(1, 3)), init=init)
        g.call(
            "multiplier",
            "hflow.ops.constraints.lagrange_multiplier",
            cost=reward.score,
            log_multiplier=before,
        )
    trained: list[NodeHandle] = []
    betas = draw(st.sampled_from([[0.9, 0.999], [0.5, 0]]))  # of the model, so the same in all its trains
    for number in range(num_trains):
        train = g.train(
            f"train{number}",
            model=actor,
            loss="hflow.ops.losses.ppo_clip",
            tokens=chosen.tokens,
            old_logprobs=again.logprobs,
            advantages=whitened.advantages,
            lr=draw(st.floats(0, 1e3)),
            epochs=draw(st.sampled_from([None, 1, 3])),
            minibatch=draw(st.sampled_from([None, 1])),
            betas=betas,
            max_lag=draw(st.integers(2, 3)),
            clip_high=draw(st.sampled_from([None, 0.3])),
            after=list(trained),
        )
        trained.append(train)
    if draw(st.booleans()):
        g.evaluate(reward.score, rows=8, every=draw(st.integers(0, 3)))
    graph = g.graph()
    assert load_text(g.yaml(), __file__) == graph
    return graph


@pytest.mark.slow
@given(graphs())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_graphs_round_trip(graph: Graph) -> None:
    assert_round_trip(graph)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=20), inner), max_leaves=8
)


@pytest.mark.slow
@given(PLAIN, st.text())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_values_are_written_so_that_they_are_read_back(value: Any, text: str) -> None:
    assert parse(flow({"k": value}), "x").plain() == {"k": value}
    assert parse(f"k: {scalar(text, in_flow=False)}", "x").plain() == {"k": text}
    assert parse(quoted(text), "x").plain() == text
