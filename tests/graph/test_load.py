from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph, Ref
from hflow.graph.load import check, load, load_text

ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
GRPO = Path("algorithms/grpo.yaml").read_text()

# The example of the language's description, of a 7B model, with a reward that exists.
EXAMPLE = """\
# yaml-language-server: $schema=../docs/schema/graph.v1.json
hflow: 1
name: grpo
doc: Group Relative Policy Optimization, arXiv:2402.03300
params: {batch: 128, group: 8, max_new_tokens: 1024, kl_coef: 0.001, clip: 0.2, lr: 1e-6, minibatch: 256,
  steps: 1000}
models:
  actor: {path: Qwen/Qwen2.5-7B}
  ref:   {path: Qwen/Qwen2.5-7B, frozen: true}
loop: {name: step, times: "${ steps }"}
nodes:
  prompts:
    op: data
    with: {dataset: gsm8k.jsonl, batch: "${ batch }"}
    out:  {tokens: "i32[batch, prompt~]", answer: "str[batch]"}
  rollout:
    op: generate
    model: actor                       # or {use: actor, lag: 1}: one-step-off-policy
    in:   {prompt: prompts.tokens}
    with: {n: "${ group }", max_new_tokens: "${ max_new_tokens }", temperature: 1.0}
  reward:
    op: call
    fn: hflow.ops.rewards.exact_match
    in: {text: rollout.text, answer: prompts.answer}
  ref_logprobs: {op: score, model: ref, in: {tokens: rollout.tokens}}
  advantages:
    op: call
    fn: hflow.ops.advantages.group_normalise
    in: {score: reward.score}
  actor_train:
    op: train
    model: actor
    loss: hflow.ops.losses.ppo_clip
    in: {tokens: rollout.tokens, old_logprobs: rollout.logprobs, ref_logprobs: ref_logprobs.logprobs,
         advantages: advantages.advantages}
    repeat: {epochs: 1, minibatch: "${ minibatch }"}
    with: {lr: "${ lr }", clip: "${ clip }", kl_coef: "${ kl_coef }"}
"""
TEMPLATE = EXAMPLE.replace("dataset: gsm8k.jsonl,", 'dataset: gsm8k.jsonl, prompt: "{{ question }}",')


def types(graph: Graph, node: str) -> dict[str, str]:
    return {o.port: str(o.type) for o in graph.node(node).outputs}


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_algorithms_load_without_a_word(path: Path) -> None:
    graph, warnings = check(path)
    assert not warnings
    assert graph.name == path.stem


def test_the_example_asks_for_a_template() -> None:
    with pytest.raises(HflowError) as caught:
        load_text(EXAMPLE)
    assert [(d.code, d.message) for d in caught.value.diagnostics] == [("HF101", "missing option `prompt`")]


def test_the_types_of_the_example() -> None:
    graph = load_text(TEMPLATE)
    assert [n.name for n in graph.nodes] == [
        "prompts",
        "rollout",
        "reward",
        "ref_logprobs",
        "advantages",
        "actor_train",
    ]
    assert types(graph, "rollout") == {
        "tokens": "i32[batch*group, seq~]",
        "logprobs": "f32[batch*group, resp~]<actor@k behaviour>",
        "mask": "bool[batch*group, resp~]",
        "text": "str[batch*group]",
    }
    assert types(graph, "ref_logprobs")["logprobs"] == "f32[batch*group, resp~]<ref@k scored>"
    assert types(graph, "advantages") == {"advantages": "f32[batch*group]"}
    tokens = graph.node("rollout").output("tokens")
    assert tokens and tokens.type.rows == 128 * 8
    assert tokens.type.dims[1].size == 512 + 1024


def test_defaults_are_filled_in() -> None:
    graph = load_text(TEMPLATE)
    train, prompts = graph.node("actor_train"), graph.node("prompts")
    assert train.options["betas"] == [0.9, 0.999]
    assert train.options["aggregate"] == "token_mean"
    assert train.options["lr"] == 1e-6
    assert prompts.options["tokenizer"] == "actor"
    assert graph.node("ref_logprobs").options == {"temperature": 1.0}
    assert graph.node("advantages").options == {"std": "sample", "eps": 1e-6}
    assert train.function and train.function.trained == ("logprobs", "entropy")


def test_masks_are_wired_by_type() -> None:
    graph = load_text(TEMPLATE)
    for node in ("ref_logprobs", "actor_train"):
        mask = graph.node(node).input("mask")
        assert mask and mask.derived and mask.source == Ref("rollout", "mask")
    assert all(not i.derived for _, i in graph.edges() if i.port != "mask")


def test_a_minibatch_is_all_rows_unless_said_otherwise() -> None:
    repeat = load("algorithms/sft.yaml").node("actor_train").repeat
    assert repeat and (repeat.epochs, repeat.minibatch) == (1, 256)


def test_a_lag_is_part_of_what_log_probs_are() -> None:
    lagging = TEMPLATE.replace("model: actor  ", "model: {use: actor, lag: 1}  ")
    graph = load_text(lagging.replace('kl_coef }"}', 'kl_coef }", max_lag: 1}'))
    assert types(graph, "rollout")["logprobs"] == "f32[batch*group, resp~]<actor@k-1 behaviour>"


def test_nodes_come_in_file_order_where_edges_leave_it_open() -> None:
    head, _, tail = TEMPLATE.partition("nodes:\n")
    names, body = [], dict[str, str]()
    for line in tail.splitlines(keepends=True):
        if line[2] != " ":
            names.append(line.split(":")[0].strip())
        body[names[-1]] = body.get(names[-1], "") + line
    shuffled = ["ref_logprobs", "actor_train", "advantages", "reward", "rollout", "prompts"]
    graph = load_text(head + "nodes:\n" + "".join(body[n] for n in shuffled))
    order = [n.name for n in graph.nodes]
    assert order == ["prompts", "rollout", "ref_logprobs", "reward", "advantages", "actor_train"]


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_graphs_round_trip_as_json(path: Path) -> None:
    graph, adapter = load(path), TypeAdapter(Graph)
    assert adapter.validate_json(adapter.dump_json(graph)) == graph


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_loading_twice_gives_the_same_graph(path: Path) -> None:
    assert load(path) == load(path)
