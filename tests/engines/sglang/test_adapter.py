"""An adapter on a real SGLang server that has read its base, against PEFT on the transformers model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import hflow
from hflow.graph.adapter import ADAPTER_TARGETS, Adapter
from hflow.plan.replicas import instance_of
from hflow.runtime.engines.protocol import EngineCall, Result
from hflow.runtime.engines.sglang.engine import SglangModel
from hflow.runtime.rows import from_lists
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.worker.world import World
from tests.engines.models import Folders, some_prompts
from tests.engines.sglang.test_engine import lists, renew, same, scheduler
from tests.engines.sglang.test_engine import world as world  # a fixture
from tests.engines.test_adapter import Matrices, matrices, peft_model
from tests.installed import needs_sglang

pytestmark = [needs_sglang, pytest.mark.slow, pytest.mark.timeout(400)]
LOG_PROBS = 1e-4  # float32, other kernels
PROMPTS = some_prompts(6)
# Of the matrices that SGLang fuses, some have no adapter.
SOME = Adapter(3, 6.0, ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
ALL = Adapter(4, 8.0, ADAPTER_TARGETS)


@dataclass(frozen=True)
class Served:
    folder: str
    adapter: Adapter
    plan: hflow.Plan
    engine: SglangModel

    def matrices(self, factor: float) -> Matrices:
        return {name: factor * value for name, value in matrices(self.folder, self.adapter).items()}

    def run(self, name: str) -> Result:
        call = EngineCall(self.plan.graph.node(name), self.plan.node(name), 0, len(PROMPTS), seed=5, step=0)
        return self.engine.run(call, {"prompt": from_lists(PROMPTS)})

    def check(self, values: Matrices) -> None:
        """Greedy tokens, and log-probs of these and of drawn ones, are those of PEFT with `values`."""
        model = peft_model(self.folder, self.adapter, values, torch.float32)
        for name in ("rollout", "greedy"):
            outputs = self.run(name).outputs
            for tokens, told in zip(lists(outputs["tokens"]), lists(outputs["logprobs"]), strict=True):
                with torch.inference_mode():
                    found = model(torch.tensor([tokens])).logits[0].log_softmax(-1)[-len(told) - 1 : -1]
                new = torch.tensor(tokens[-len(told) :])
                assert name == "rollout" or found.argmax(-1).tolist() == new.tolist()
                wanted = found.gather(1, new[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(told), wanted, atol=LOG_PROBS, rtol=0)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen2", SOME), id="qwen2"),
        pytest.param(("qwen3", ALL), id="qwen3", marks=pytest.mark.acceptance),
        pytest.param(("llama llama3", ALL), id="llama", marks=pytest.mark.acceptance),
    ],
)
def served(request: pytest.FixtureRequest, folders: Folders, world: World) -> Iterator[Served]:
    family, adapter = request.param
    folder, targets = folders.of(family, tied=False), ",".join(adapter.targets)
    overrides = [
        f"params.model={folder}", f"nodes.prompts.with.batch={len(PROMPTS)}",
        f"nodes.actor_train.repeat.minibatch={len(PROMPTS)}",
        f"models.actor.adapter={{rank: {adapter.rank}, alpha: {adapter.alpha}, targets: [{targets}]}}",
    ]  # fmt: skip
    files = ["tests/runtime/graphs/greedy_twice.yaml"]
    graph = hflow.load("tests/runtime/graphs/adapted.yaml", overrides, files)
    plan = hflow.compile(graph, "local1", engines=("rollout=sglang", "greedy=sglang"))
    nodes = [(graph.node(name), plan.node(name)) for name in ("rollout", "greedy")]
    assert plan.shapes["actor"].adapter == adapter
    engine = SglangModel(
        plan.graph.model("actor"), plan.shapes["actor"],
        instance_of(nodes[0][0], nodes[0][1].sharding).sharding, 0, world.cores, world.group,
        load_tokenizer(folder), world.device, nodes, False, 0, graph.seed, world.aborted, lambda _: None,
    )  # fmt: skip
    yield Served(folder, adapter, plan, engine)
    engine.close()


def test_it_answers_as_peft_does(served: Served) -> None:
    """Before the first renewal it is the base. The same prompts, with another adapter, are read anew: none of
    their keys and values are left."""
    assert {name.rpartition(".lora_")[1] for name in served.engine.weights.names()} == {".lora_"}
    served.check(served.matrices(0.0))
    for version, factor in ((1, 1.0), (2, -2.0)):
        renew(served.engine, served.matrices(factor), version)
        served.check(served.matrices(factor))


@pytest.mark.acceptance
def test_a_server_that_died_has_the_adapter_again(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    renew(served.engine, served.matrices(1.0), 3)
    wanted = served.run("rollout")
    scheduler(served.engine).kill()
    assert same(served.run("rollout"), wanted)
    assert "SGLang was lost" in caplog.text
