"""The engine on one rank with a real server: new weights, lost servers, refused updates."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import psutil
import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import hflow
from hflow.graph.ir import Node
from hflow.plan.node_plan import NodePlan
from hflow.plan.replicas import instance_of
from hflow.runtime.engines.protocol import EngineCall, NodeError, Result, Stopped
from hflow.runtime.engines.sglang import requests, server
from hflow.runtime.engines.sglang import weights as served_weights
from hflow.runtime.engines.sglang.engine import SglangModel
from hflow.runtime.rows import Rows, from_lists
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.new_model import new_model
from hflow.runtime.worker.world import World
from tests.engines.models import load_hf
from tests.engines.sglang.servers import lives, tree_of, within
from tests.installed import needs_sglang

pytestmark = [needs_sglang, pytest.mark.slow, pytest.mark.timeout(400)]
ROWS, NEW = 24, 100  # enough to be interrupted
LOG_PROBS = 1e-4  # float32, other kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "lm"
    new_model(
        folder, family="qwen2", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, alphabet="0123456789+=. ",
        max_positions=256, tied=True, seed=3,
    )  # fmt: skip
    # nearly every token would end a response if SGLang heeded it
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(3, 60))}))
    return str(folder)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World.join(HashStore(), 0, 1, torch.device("cpu"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def plan(folder: str) -> hflow.Plan:
    """Two prompts, half of the rows each."""
    overrides = [
        f"params.model={folder}", "nodes.prompts.with.batch=2", f"nodes.rollout.with.n={ROWS // 2}",
        f"nodes.rollout.with.max_new_tokens={NEW}", "nodes.actor_train.repeat.minibatch=24",
    ]  # fmt: skip
    graph = hflow.load("tests/runtime/graphs/grpo_tiny.yaml", overrides)
    return hflow.compile(graph, "local1", engines=("rollout=sglang",))


@pytest.fixture(scope="module")
def engine(plan: hflow.Plan, world: World) -> Iterator[SglangModel]:
    """Weights reach it in several buckets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_weights, "BUCKET_ELEMENTS", 4000)
        model, own = plan.graph.model("actor"), plan.node("rollout")
        node = plan.graph.node("rollout")
        made = SglangModel(
            model, plan.shapes["actor"], instance_of(node, own.sharding).sharding, 0, world.cores,
            world.group, load_tokenizer(model.path), world.device, [(node, own)], True, 0, plan.graph.seed,
            world.aborted, lambda _: None,
        )  # fmt: skip
    assert len(made.weights.buckets) > 3
    yield made
    made.close()


def run(engine: SglangModel, node: Node, plan: NodePlan, step: int = 0) -> Result:
    prompts = from_lists([[3, 4, 5, 6], [7, 8, 9]])
    return engine.run(EngineCall(node, plan, 0, 2, seed=5, step=step), {"prompt": prompts})


def run_s(engine: SglangModel, node: Node, plan: NodePlan) -> float:
    """Seconds of a run on a server that is there."""
    run(engine, node, plan)
    began = time.monotonic()
    run(engine, node, plan)
    return time.monotonic() - began


def renew(engine: SglangModel, values: Mapping[str, torch.Tensor], version: int) -> None:
    weights = engine.weights
    weights.version = version
    weights.allocate()
    for bucket in weights.buckets:
        for name, box in bucket.boxes.items():
            weights.view(name, box).copy_(values[name])
        weights.hand_over()


def perturbed(folder: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = load_hf(folder).state_dict()
    return {
        n: v + 0.1 * torch.randn(v.shape, generator=generator) for n, v in state.items() if "lm_head" not in n
    }


def log_probs(folder: str, values: Mapping[str, torch.Tensor], tokens: list[int], new: int) -> torch.Tensor:
    """transformers' log-probs of the last `new` tokens."""
    model = load_hf(folder)
    model.load_state_dict(dict(values), strict=False)
    with torch.inference_mode():
        found = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return found[-new - 1 : -1].gather(1, torch.tensor(tokens[-new:])[:, None]).squeeze(1)


def scheduler(engine: SglangModel) -> psutil.Process:
    found = [p for p in psutil.Process().children(recursive=True) if "scheduler" in " ".join(p.cmdline())]
    assert len(found) == 1, found
    return found[0]


def kill(victim: psutil.Process) -> None:
    victim.kill()
    assert within(5.0, lambda: not lives(victim))


def same(a: Result, b: Result) -> bool:
    """Tokens are equal; log-probs as far as rounding does not depend on who is in a batch."""
    mine, theirs = (result.outputs["logprobs"].values for result in (a, b))
    return a.digest == b.digest and torch.allclose(mine, theirs, atol=LOG_PROBS)


def lists(rows: Rows) -> list[list[int]]:
    assert rows.lengths is not None
    return [part.tolist() for part in rows.values.split(rows.lengths.tolist())]


def test_it_samples_with_the_weights_that_it_was_given(
    engine: SglangModel, plan: hflow.Plan, folder: str
) -> None:
    node, own = plan.graph.node("rollout"), plan.node("rollout")
    seen = []
    for version in (1, 2):
        values = perturbed(folder, version)
        renew(engine, values, version)
        result = run(engine, node, own)
        seen.append(result.digest)
        responses = result.outputs["logprobs"]
        assert responses.lengths is not None
        ends = responses.values.split(responses.lengths.tolist())
        for tokens, told in list(zip(lists(result.outputs["tokens"]), ends))[::5]:
            wanted = log_probs(folder, values, tokens, len(told))
            assert torch.allclose(told, wanted, atol=LOG_PROBS), (told - wanted).abs().max()
    assert seen[0] != seen[1]
    assert run(engine, node, own).digest == seen[1]
    assert run(engine, node, own, step=1).digest != seen[1]


@pytest.mark.rotating(6)
def test_a_server_with_older_weights_evaluates_the_newest(
    engine: SglangModel, plan: hflow.Plan, folder: str
) -> None:
    """One server: it is given the newest, and afterwards its own again, also if it has died in between."""
    node, own = plan.graph.node("rollout"), plan.node("rollout")
    older, newest, evaluator = perturbed(folder, 1), perturbed(folder, 2), engine.evaluator()
    renew(engine, newest, 1)
    wanted = run(engine, node, own)
    renew(engine, older, 2)
    before = run(engine, node, own)
    assert not same(before, wanted)
    for dies in (False, True):
        evaluator.weights.release()
        assert all(bucket.memory is None for bucket in evaluator.weights.buckets)
        renew(evaluator, newest, 3)
        assert same(run(evaluator, node, own), wanted)
        if dies:
            kill(scheduler(engine))
        assert same(run(engine, node, own), before)
    assert scheduler(engine).is_running(), "one"


@pytest.mark.rotating(6)
def test_a_killed_scheduler_costs_no_row(
    engine: SglangModel, plan: hflow.Plan, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The next server gets the last weights, and the rows that were not done: they come out the same."""
    node, own = plan.graph.node("rollout"), plan.node("rollout")
    renew(engine, perturbed(folder, 3), 3)
    undisturbed = run(engine, node, own)
    victim, tree = scheduler(engine), tree_of(psutil.Process().pid)[1:]
    killer = threading.Timer(run_s(engine, node, own) / 4, victim.kill)
    killer.start()
    disturbed = run(engine, node, own)
    killer.join()
    assert not lives(victim)
    assert "SGLang was lost" in caplog.text
    assert same(undisturbed, disturbed)
    assert not [p for p in tree if lives(p) and "sglang" in " ".join(p.cmdline())]
    assert same(undisturbed, run(engine, node, own))


@pytest.mark.rotating(6)
def test_a_server_that_hangs_is_replaced(
    engine: SglangModel, plan: hflow.Plan, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, own = plan.graph.node("rollout"), plan.node("rollout")
    undisturbed = run(engine, node, own)
    monkeypatch.setattr(requests, "STALL_S", 2.0)
    monkeypatch.setattr(server, "HEALTH_S", 2.0)
    victim = scheduler(engine)
    stopper = threading.Timer(run_s(engine, node, own) / 4, victim.suspend)
    stopper.start()
    disturbed = run(engine, node, own)
    stopper.join()
    assert "no answer for 2 s" in caplog.text
    assert not lives(victim)
    assert same(undisturbed, disturbed)


@pytest.mark.rotating(6)
def test_a_server_that_died_meanwhile_is_started_again_for_new_weights(
    engine: SglangModel, plan: hflow.Plan, folder: str
) -> None:
    node, own = plan.graph.node("rollout"), plan.node("rollout")
    renew(engine, perturbed(folder, 6), 6)
    wanted = run(engine, node, own)
    kill(scheduler(engine))
    renew(engine, perturbed(folder, 6), 6)
    assert same(wanted, run(engine, node, own))


@pytest.mark.rotating(6)
@pytest.mark.parametrize("dies", [False, True])
def test_weights_come_in_flight(
    engine: SglangModel, plan: hflow.Plan, folder: str, caplog: pytest.LogCaptureFixture, dies: bool
) -> None:
    """Rows go on with the new weights; if the server dies, unfinished ones begin anew with the newest. Each
    token is by the version that it tells."""
    node = plan.graph.node("rollout")
    own, told = plan.node("rollout"), replace(node.output("mask") or node.outputs[0], port="versions")
    node = replace(node, outputs=(*node.outputs, told))
    call, prompts = EngineCall(node, own, 0, 2, seed=5, step=0), from_lists([[3, 4, 5, 6], [7, 8, 9]])
    values = {version: perturbed(folder, version) for version in (7, 8, 9)}

    def rows_renewed_every(apart_s: float) -> list[tuple[list[int], list[int], list[float]]]:
        renew(engine, values[7], 7)
        engine.begin(call, {"prompt": prompts})
        for version in (8, 9):
            time.sleep(apart_s)
            renew(engine, values[version], version)
        if dies:
            scheduler(engine).kill()
        result = engine.run(call, {"prompt": prompts})
        return list(zip(*(lists(result.outputs[port]) for port in ("tokens", "versions", "logprobs"))))

    renew(engine, values[7], 7)
    apart_s = run_s(engine, node, own) / 4
    for shorter in (1, 2, 4, 8):  # the rows may have ended sooner than those that were timed
        rows = rows_renewed_every(apart_s / shorter)
        renewed_twice = any(len(set(versions)) == 3 for _, versions, _ in rows)
        if dies or renewed_twice:
            break
    assert dies or renewed_twice
    assert ("SGLang was lost" in caplog.text) == dies
    assert len(rows) == ROWS
    seen = {v for _, versions, _ in rows for v in versions}
    assert 9 in seen <= {7, 8, 9}
    for tokens, versions, told_log_probs in rows[::5]:
        assert versions == sorted(versions)
        for version in set(versions):
            wanted = log_probs(folder, values[version], tokens, len(versions))
            mine = torch.tensor([v == version for v in versions])
            found = torch.tensor(told_log_probs)
            assert torch.allclose(found[mine], wanted[mine], atol=LOG_PROBS)


@pytest.mark.rotating(6)
def test_a_server_that_dies_while_it_is_renewed_gets_the_weights_later(
    engine: SglangModel, plan: hflow.Plan, folder: str
) -> None:
    node, own = plan.graph.node("rollout"), plan.node("rollout")
    renew(engine, perturbed(folder, 10), 10)
    wanted = run(engine, node, own)
    renew(engine, perturbed(folder, 11), 11)
    weights, victim = engine.weights, scheduler(engine)
    weights.version = 10
    weights.allocate()
    for number, bucket in enumerate(weights.buckets):
        if number == 1:
            kill(victim)
        for name, box in bucket.boxes.items():
            weights.view(name, box).copy_(perturbed(folder, 10)[name])
        weights.hand_over()
    assert same(wanted, run(engine, node, own))


def test_rows_are_the_same_on_another_replica(engine: SglangModel, plan: hflow.Plan) -> None:
    """The second prompt's rows, asked for alone and by their global numbers."""
    node, own = plan.graph.node("rollout"), plan.node("rollout")
    both = lists(run(engine, node, own).outputs["tokens"])
    alone = engine.run(EngineCall(node, own, 1, 1, seed=5, step=0), {"prompt": from_lists([[7, 8, 9]])})
    assert lists(alone.outputs["tokens"]) == both[ROWS // 2 :]


def test_responses_end_at_the_tokenizers_end_only(engine: SglangModel, plan: hflow.Plan, folder: str) -> None:
    """As on Megatron, whatever ``generation_config.json`` adds to it."""
    end, lengths = load_tokenizer(folder).eos_id, list[int]()
    responses = run(engine, plan.graph.node("rollout"), plan.node("rollout")).outputs
    for tokens, told in zip(lists(responses["tokens"]), lists(responses["logprobs"])):
        new = tokens[-len(told) :]
        assert end not in new[:-1] and (new[-1] == end or len(new) == NEW)
        lengths.append(len(new))
    assert max(lengths) > NEW / 4


def test_no_rows(engine: SglangModel, plan: hflow.Plan) -> None:
    call = EngineCall(plan.graph.node("rollout"), plan.node("rollout"), 0, 0, seed=5, step=0)
    assert len(engine.run(call, {"prompt": from_lists([])}).outputs["tokens"]) == 0


def test_other_weights_than_the_newest_are_noticed(
    engine: SglangModel, plan: hflow.Plan, folder: str
) -> None:
    renew(engine, perturbed(folder, 4), 4)
    engine.weights.version = 5
    with pytest.raises(NodeError, match="sampled with weights of version 4, not 5") as caught:
        run(engine, plan.graph.node("rollout"), plan.node("rollout"))
    assert caught.value.code == "HF410"


def test_a_refused_update_is_told_in_sglangs_words(engine: SglangModel, folder: str) -> None:
    present = engine.replica._server
    assert present
    present.post("/begin_weight_update")
    with pytest.raises(NodeError, match="session is already open") as caught:
        renew(engine, perturbed(folder, 5), 5)
    assert caught.value.code == "HF410"
    present.post("/end_weight_update")
    renew(engine, perturbed(folder, 5), 5)


def test_it_gives_up_when_nobody_waits(engine: SglangModel, plan: hflow.Plan, world: World) -> None:
    """Also the end of the server: what it works on is of no use any more."""
    node, own = plan.graph.node("rollout"), plan.node("rollout")
    told = threading.Timer(run_s(engine, node, own) / 4, world.aborted.set)
    told.start()
    began = time.monotonic()
    with pytest.raises(Exception) as caught:
        run(engine, node, own)
    assert type(world.explain(caught.value)).__name__ == "Aborted"
    assert time.monotonic() - began < 60
    world.aborted.clear()


def test_a_server_is_not_awaited_when_nobody_waits(engine: SglangModel, world: World) -> None:
    began = time.monotonic()
    world.aborted.set()
    with pytest.raises(Stopped):
        engine.replica._start()
    assert time.monotonic() - began < 5
    world.aborted.clear()


@pytest.mark.rotating(6)
def test_log_probs_that_are_not_finite_are_told_by_their_row(
    engine: SglangModel, plan: hflow.Plan, folder: str
) -> None:
    """A NaN in the last norm makes every logit NaN; SGLang samples all the same."""
    node, own = plan.graph.node("rollout"), plan.node("rollout")
    values = perturbed(folder, 9)
    values["model.norm.weight"] = values["model.norm.weight"] * float("nan")
    version = engine.weights.version + 1
    renew(engine, values, version)
    with pytest.raises(NodeError) as caught:
        run(engine, node, own, step=7)
    renew(engine, perturbed(folder, 9), version + 1)
    assert run(engine, node, own).digest
    assert (caught.value.code, caught.value.node) == ("HF405", "rollout")
    assert caught.value.message == "step 7: SGLang's log-prob of response token 0 of row 0 is nan"
