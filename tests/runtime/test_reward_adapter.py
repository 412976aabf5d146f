"""A reward model that is an adapter on the actor's base, while the actor's own adapter is trained."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.adapter import Adapter
from hflow.graph.run_config import CheckpointPolicy, RunConfig, SamplePolicy
from hflow.plan.frozen import frozen_names
from hflow.plan.parameters import SCALAR_HEAD, parameters
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.plan.verify.consistency import inconsistencies
from hflow.runtime.controller.inline_pool import InlinePool
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.tokenizer import load_tokenizer
from tests.engines.test_stored_adapter import write_adapter
from tests.runtime.matrix import GRAPHS
from tests.runtime.memory import kept_bytes, put_away
from tests.runtime.test_resume import up_to, weights
from tests.runtime.test_shared_bases import LAYOUTS, READERS, engines, inline, state_bytes, untimed

__all__ = ["inline"]  # a fixture

KEPT = RunConfig(CheckpointPolicy(every=1, keep=99), samples=SamplePolicy(every=1))
APART = ["models.reward.base=null"]
TRAINED = ("actor_train", "critic_train")


class Folders:
    """The base, and an adapter on it with a scalar head, by PEFT."""

    def __init__(self, base: Path, adapter: Path):
        self.base, self.adapter = base, adapter
        targets = ["q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"]
        self.peft: Any = write_adapter(adapter, str(base), "scalar", r=5, target_modules=targets)

    def plan(self, layout: str, *more: str, pins: tuple[str, ...] = ()) -> Plan:
        params = [f"params.model={self.base}", f"params.reward_adapter={self.adapter}", "params.steps=2"]
        graph = hflow.load(GRAPHS / "adapted_reward.yaml", [*params, *more])
        others, rollout = LAYOUTS[layout]
        where = dict.fromkeys((*(r for r in READERS if r != "reward"), *TRAINED), others)
        own = [f"{name}={place}" for name, place in (where | {"rollout": rollout}).items()]
        own += [f"reward={others}"] * ("models.reward.base=null" in more)
        return hflow.compile(graph, "local1" if layout == "one worker" else "local4", [*own, *pins])

    def score(self, tokens: list[int]) -> float:
        """Of a row, by PEFT's model in float64."""
        with torch.no_grad():
            hidden = self.peft.base_model.model.model(torch.tensor([tokens]))[0][0]
            return float(self.peft.base_model.model.score(hidden)[-1, 0])


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tiny_model, tmp_path_factory.mktemp("adapters") / "reward")


class Runs(dict[str, Run]):
    """By layout, or `apart`: in tp2, and the reward model has a base of its own. Each is made once."""

    def __init__(self, pool: Pool, folders: Folders, root: Path):
        super().__init__()
        self.pool, self.folders, self.root = pool, folders, root

    def __missing__(self, name: str) -> Run:
        plan = self.folders.plan("tp2", *APART) if name == "apart" else self.folders.plan(name)
        self[name] = execute(plan, self.root / name.replace(" ", "_"), pool=self.pool, config=KEPT)
        return self[name]


@pytest.fixture(scope="module")
def runs(workers: Pool, folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(workers, folders, tmp_path_factory.mktemp("judged"))


def judged(run: Run, base: Path) -> list[tuple[list[int], float]]:
    """The tokens of sampled rows, and their rewards. A token is one character, or its name in brackets; texts
    do not say padding tokens, and rows with one are left out."""
    known = AutoTokenizer.from_pretrained(base).get_vocab()
    found: list[tuple[list[int], float]] = []
    for file in sorted((run.folder / "samples").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            answer = [known[token] for token in re.findall(r"<[^>]+>|.", row["response"])]
            answer += [load_tokenizer(str(base)).eos_id] * (row["finish"] == "eos")
            if len(answer) == row["length"]:
                found.append(([*(known[token] for token in row["prompt"]), *answer], row["reward"]))
    return found


@pytest.mark.parametrize("name", [*LAYOUTS, "apart"])
def test_rewards_are_pefts(runs: Runs, folders: Folders, name: str) -> None:
    """In both steps, whatever the actor's adapter has learned by then; in float32."""
    rows = judged(runs[name], folders.base)
    assert len(rows) > 36 and len({reward for _, reward in rows}) > 10
    for tokens, reward in rows:
        assert reward == pytest.approx(folders.score(tokens), abs=1e-5)


def test_what_is_learned_is_the_same(runs: Runs) -> None:
    """To the last bit, with one base or with two."""
    shared, apart = runs["tp2"], runs["apart"]
    assert untimed(shared) == untimed(apart)
    found, expected = weights(shared.folder), weights(apart.folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_frozen_adapter_is_in_no_checkpoint(
    runs: Runs, workers: Pool, folders: Folders, tmp_path: Path
) -> None:
    """A run goes on in another layout, and reads it again."""
    first = runs["tp2"]
    assert not [*first.folder.glob("export/reward")]
    manifests = [*first.folder.glob("checkpoints/*/manifest.json")]
    assert manifests and all("models/reward" not in m.read_text() for m in manifests)
    folder = up_to(first.folder, 1, tmp_path / "again")
    execute(folders.plan("pp2"), folder, pool=workers, config=KEPT, resume=True)
    expected = weights(first.folder)
    for name, values in weights(folder).items():
        torch.testing.assert_close(values, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_the_base_is_there_once(inline: InlinePool, folders: Folders) -> None:
    """Of three models that have it; a plan counts it once."""
    plans = [folders.plan("one worker", *more) for more in (APART, [])]
    inline.form(1)
    measured: list[int] = []
    for plan in plans:
        inline.call("load", put_away(plan, TRAINED))
        for engine in (e for name, e in engines(inline).items() if name != "reward"):
            engine.onload()
        measured.append(state_bytes(engines(inline)))
        assert measured[-1] == kept_bytes(plan)
    shape = plans[0].shapes["reward"]
    names = frozen_names(shape, ())
    base = 4 * sum(p.size for p in parameters(shape) if p.name in names)
    assert measured[0] - measured[1] == base > 50_000
    assert on_one_memory(inline, names) == {True}
    inline.call("run", 0)
    assert on_one_memory(inline, names) == {True}


def on_one_memory(pool: InlinePool, names: frozenset[str]) -> set[bool]:
    actor, reward = (engines(pool)[name].weights for name in ("actor", "reward"))
    assert len(names) > 20
    return {actor.view(n, actor.box(n)).data_ptr() == reward.view(n, reward.box(n)).data_ptr() for n in names}


def test_training_goes_on_with_an_exported_adapter(inline: InlinePool, runs: Runs, folders: Folders) -> None:
    """It begins with the numbers that were exported, a scalar head among them, and gives what PEFT's does."""
    exported = runs["tp2"].folder / "export"
    actor, critic = (exported / name / "adapter" for name in ("actor", "critic"))
    names = {"actor": actor, "critic": critic}
    more = [f"models.{name}.adapter={{path: {folder}}}" for name, folder in names.items()]
    plan = folders.plan("one worker", *more)
    assert plan.shapes["critic"].adapter == Adapter(3, 32.0, ("q_proj", "v_proj", "up_proj", "down_proj"))
    inline.form(1)
    inline.call("load", plan)
    for name, folder in names.items():
        held, stored = engines(inline)[name].weights, load_file(folder / "adapter_model.safetensors")
        assert ("base_model.model." + SCALAR_HEAD in stored) == (name == "critic")
        for key, values in stored.items():
            own = key.removeprefix("base_model.model.")
            assert torch.equal(held.read(own, held.box(own)), values), key
    before = {n: held.read(n, held.box(n)).clone() for n in held.names() if "lora_" in n}
    inline.call("run", 0)
    assert any(not torch.equal(held.read(n, held.box(n)), values) for n, values in before.items())


def test_a_reference_may_be_the_adapter_that_training_began_with(
    workers: Pool, runs: Runs, folders: Folders, tmp_path: Path
) -> None:
    """On the actor's base: it gives what the actor gives before its first update."""
    stored = f"{{path: {runs['tp2'].folder / 'export' / 'actor' / 'adapter'}}}"
    more = [f"models.actor.adapter={stored}", f"models.ref.adapter={stored}", "models.ref.base=actor"]
    plan = folders.plan("tp2", *more)
    assert plan.node("ref_logprobs").sharding == plan.node("actor_train").sharding
    run = execute(plan, tmp_path / "run", pool=workers, export=False)
    assert run.metrics[0]["shaped.kl"] == pytest.approx(0.0, abs=1e-6)
    assert run.metrics[1]["shaped.kl"] > 1e-6


def test_another_adapter_than_the_plan_was_made_of_is_refused(folders: Folders, tmp_path: Path) -> None:
    """As other files of a model are."""
    write_adapter(tmp_path / "own", str(folders.base), "scalar", target_modules=["v_proj"])
    plan = folders.plan("one worker", f"params.reward_adapter={tmp_path / 'own'}")
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").hash == plan.hash
    write_adapter(tmp_path / "own", str(folders.base), "scalar", target_modules=["q_proj", "v_proj"])
    with pytest.raises(HflowError, match=r"HF406[\s\S]*adapter_model.safetensors"):
        execute(plan, tmp_path / "run", pool=InlinePool())


def test_an_edited_plan_that_parts_them_is_refused(folders: Folders) -> None:
    plan = folders.plan("tp2")
    reward = plan.node("reward")
    mesh = replace(reward.mesh, devices=reward.mesh.devices[::-1])
    nodes = tuple(replace(n, mesh=mesh) if n is reward else n for n in plan.nodes)
    found = "`reward` scores in another layout than `actor`, whose base it has"
    assert found in [*inconsistencies(replace(plan, nodes=nodes))]


def test_peft_reads_what_is_exported_and_hflow_what_peft_writes(
    runs: Runs, folders: Folders, tmp_path: Path
) -> None:
    """An adapter that went through PEFT is the same afterwards."""
    exported = runs["tp2"].folder / "export" / "actor" / "adapter"
    base: Any = AutoModelForCausalLM.from_pretrained(folders.base)
    PeftModel.from_pretrained(base, str(exported)).save_pretrained(str(tmp_path))
    plans = [
        folders.plan("one worker", f"models.actor.adapter={{path: {folder}}}")
        for folder in (exported, tmp_path)
    ]
    assert plans[0].shapes == plans[1].shapes
    ours, theirs = (load_file(f / "adapter_model.safetensors") for f in (exported, tmp_path))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
