"""Rollouts by the real SGLang in runs with real workers, beside Megatron's in the same runs."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

import hflow
from hflow.graph.lengths_file import read_lengths
from hflow.plan.cluster_file import load_cluster
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.tools.new_model import new_model
from tests.installed import needs_sglang
from tests.runtime.matrix import GRAPHS
from tests.runtime.test_resume import EVERY, assert_older

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    needs_sglang,
]
STEPS = 3
AGREE = 2e-3  # mean |difference| of log-probs, nats


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory.mktemp("model") / "lm", "lm")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory.mktemp("model") / "scalar", "scalar")


def _model(folder: Path, head: str, family: str = "qwen2", kv_heads: int = 2) -> Path:
    """Random weights; 64 tokens, which SGLang cuts over tp as hflow does."""
    new_model(
        folder, family=family, layers=2, hidden=32, heads=4, kv_heads=kv_heads, ffn=64,
        alphabet="+=. " + string.digits + string.ascii_letters[:42], max_positions=64, tied=False,
        seed=3 if head == "lm" else 5, force=False, head=head,
    )  # fmt: skip
    return folder


def _run(name: str, pool: Pool, folder: Path, pins: tuple[str, ...], **params: object) -> Run:
    """Three steps; in each, the actor also answers greedily, on SGLang and on Megatron."""
    overrides = [f"params.{key}={value}" for key, value in {**params, "steps": STEPS}.items()]
    graph = hflow.load(GRAPHS / f"{name}.yaml", overrides, [GRAPHS / "greedy_twice.yaml"])
    engines = "rollout=sglang", "greedy=sglang"
    plan = hflow.compile(graph, load_cluster("local4"), pins, engines=engines)
    assert [n.node for n in plan.nodes if n.engine == "sglang"] == ["rollout", "greedy"]
    return execute(plan, folder, pool=pool, export=False)


def _check(run: Run) -> None:
    """It learned in every step, and SGLang had the newest weights in each."""
    assert len({line["digest.rollout"] for line in run.metrics}) == STEPS
    assert len({line["digest.greedy"] for line in run.metrics}) == STEPS
    for line in run.metrics:
        assert line["digest.greedy"] == line["digest.greedy_again"]
        assert line["actor_train.grad_norm"] > 1e-3
        assert 0 < line["actor_train.mismatch"] < AGREE
        assert line["actor_train.staleness"] == 0


def test_ppo_on_a_colocated_pair(workers: Pool, model: Path, reward_model: Path, tmp_path: Path) -> None:
    """Weights change their layout on the way, from two replicas to two ranks that share them."""
    pins = "actor_train=dp2@0-1", "rollout=tp2@0-1", "values=dp2@0-1", "reward=dp2@0-1"
    models = {"model": model, "reward_model": reward_model}
    _check(_run("ppo_small", workers, tmp_path / "run", pins, **models))


def test_grpo_on_two_replicas_elsewhere(workers: Pool, model: Path, tmp_path: Path) -> None:
    """Weights come from other devices, and change their layout on the way."""
    pins = "actor_train=tp2@0-1", "rollout=dp2@2-3"
    _check(_run("grpo_tiny", workers, tmp_path / "run", pins, model=model))


@pytest.mark.rotating(6)
def test_ranks_that_share_a_head_of_keys_and_values(workers: Pool, tmp_path: Path) -> None:
    """On both engines, of which the trainer's weights are sent to the other."""
    model = _model(tmp_path / "model", "lm", kv_heads=1)
    pins = "actor_train=tp2@0-1", "rollout=tp2@2-3"
    _check(_run("grpo_tiny", workers, tmp_path / "run", pins, model=model))


@pytest.mark.rotating(6)
@pytest.mark.parametrize(
    ("family", "rotary"),
    [
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("mixtral", {}),
        ("llama", {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }),
    ],
)  # fmt: skip
def test_other_families_are_served_with_new_weights(
    workers: Pool, tmp_path: Path, family: str, rotary: dict[str, object]
) -> None:
    """Qwen3 has normalised queries and keys, Llama 3.1 stretched positions."""
    model = _model(tmp_path / "model", "lm", family)
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] |= rotary
    (model / "config.json").write_text(json.dumps(config))
    pins = "actor_train=tp2@0-1", "rollout=tp2@2-3"
    _check(_run("grpo_tiny", workers, tmp_path / "run", pins, model=model))


@pytest.mark.rotating(6)
def test_older_weights_are_the_older_ones(workers: Pool, model: Path, tmp_path: Path) -> None:
    """With `lag: 1` the server keeps generating with the weights before, while the newest are trained.
    Between steps it evaluates these: every answer tells the version that it is by, or the run ends.
    Checkpoints have the older ones, which the worker keeps for the server."""
    older = "{use: actor, lag: 1}"
    overrides = [
        f"params.model={model}", f"params.steps={STEPS}",
        f"nodes.greedy.model={older}", f"nodes.greedy_again.model={older}", "eval.every=1",
    ]  # fmt: skip
    graph = hflow.load(GRAPHS / "lagged.yaml", overrides, [GRAPHS / "greedy_twice.yaml"])
    pins = "rollout=tp1@1", "actor_train=tp1@0"
    engines = "rollout=sglang", "greedy=sglang"
    plan = hflow.compile(graph, load_cluster("local4"), pins, engines=engines)
    (there,) = (each for each in plan.memory if each.devices == (1,))
    assert len([label for label in there.parts if "actor server" in label]) == 1
    run = execute(plan, tmp_path / "run", pool=workers, export=False, config=EVERY)
    assert len(run.evaluations) == STEPS + 1 and len({*run.evaluations.values()}) > 1
    assert_older(run.folder / "checkpoints", plan, 2)
    assert [line["actor_train.staleness"] for line in run.metrics] == [0, 1, 1]
    assert len({line["digest.greedy"] for line in run.metrics}) == STEPS
    for line in run.metrics:
        assert line["digest.greedy"] == line["digest.greedy_again"]


def test_weights_reach_rollouts_in_flight(workers: Pool, model: Path, tmp_path: Path) -> None:
    """While a step trains, the next one samples with the weights before; the new ones serve the rest of its
    responses. Every token says whose it is: by Megatron's log-probs it is right."""
    steps = 6
    graph = hflow.load(GRAPHS / "in_flight.yaml", [f"params.model={model}", f"params.steps={steps}"])
    pins = "rollout=tp2@1-2", "actor_train=tp1@0", "scored=tp1@0"
    plan = hflow.compile(graph, load_cluster("local4"), pins, engines=["rollout=sglang"])
    run = execute(plan, tmp_path / "run", pool=workers, export=False)
    assert run.metrics[0]["rollout.renewed_tokens"] == 0
    for step, line in enumerate(run.metrics):
        assert_versions(line, step)
    assert any(0 < line["rollout.renewed_tokens"] < 1 for line in run.metrics)


def assert_versions(line: dict[str, float], step: int) -> None:
    """How many tokens the weights reached is up to the machine: none, some or all."""
    share = line["rollout.renewed_tokens"]
    age = line["actor_train.staleness"]  # mean of rows, each as old as its oldest token
    assert age == min(step, 1) if share == 0 else 0 <= age <= 1 - (share == 1)
    assert line["difference.newest"] == (step if share > 0 else max(0, step - 1))
    if share > 0:
        assert line["difference.newer"] < AGREE
    if 0 < share < 1:
        assert line["difference.older"] > 10 * AGREE


@pytest.mark.rotating(6)
def test_rows_longer_than_stated_are_the_same(workers: Pool, model: Path, tmp_path: Path) -> None:
    """The cache is made for a mean of 2 tokens, and most responses have 24."""
    pins = "actor_train=dp2,micro6@0-1", "rollout=dp2,micro12@2-3"
    runs: list[Run] = []
    for name, stated in (("stated", ["nodes.rollout.lengths.mean=2"]), ("unstated", [])):
        overrides = [f"params.model={model}", f"params.steps={STEPS}", "nodes.rollout.with.max_new_tokens=24"]
        graph = hflow.load(GRAPHS / "grpo_tiny.yaml", [*overrides, *stated])
        plan = hflow.compile(graph, load_cluster("local4"), pins, engines=("rollout=sglang",))
        rollout = plan.node("rollout")
        assert 0 < rollout.cache_tokens < 12 * 15 if stated else not rollout.cache_tokens
        runs.append(execute(plan, tmp_path / name, pool=workers, export=False))
    assert read_lengths(runs[0].folder)["rollout"].lengths.mean > 15
    digests = [[line["digest.rollout"] for line in run.metrics] for run in runs]
    assert digests[0] == digests[1] and len(digests[0]) == STEPS


@pytest.mark.rotating(6)
def test_two_servers_share_a_prompt(workers: Pool, model: Path, tmp_path: Path) -> None:
    """Each samples two of its four answers: those that one server samples."""
    sizes = ["nodes.prompts.with.batch=1", "nodes.rollout.with.n=4", "nodes.actor_train.repeat.minibatch=4"]
    graph = hflow.load(GRAPHS / "grpo_tiny.yaml", [f"params.model={model}", f"params.steps={STEPS}", *sizes])
    runs: list[Run] = []
    for layout in ("tp1@2", "dp2@2-3"):
        pins = "actor_train=tp1@0", "ref_logprobs=tp1@1", f"rollout={layout}"
        plan = hflow.compile(graph, load_cluster("local4"), pins, engines=("rollout=sglang",))
        runs.append(execute(plan, tmp_path / layout, pool=workers, export=False))
    digests = [[line["digest.rollout"] for line in run.metrics] for run in runs]
    assert digests[0] == digests[1] and len({*digests[0]}) == STEPS
