"""What a folder of an adapter must say: what no adapter of hflow has is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.adapter import Adapter, StoredAdapter
from hflow.graph.builder.builder import GraphBuilder
from hflow.graph.change_meaning import is_possible, meaning
from hflow.graph.ir import Graph
from hflow.graph.load import load_text
from hflow.graph.write.printer import ir
from hflow.graph.write.yaml_printer import to_yaml
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.runtime.tools.new_model import new_model
from hflow.view.picture.cards import legend

CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "SEQ_CLS", "r": 2, "lora_alpha": 6,
    "target_modules": ["v_proj", "q_proj"], "modules_to_save": ["classifier", "score"],
    "bias": "none", "lora_dropout": 0.1, "use_dora": False,
    "rank_pattern": {}, "megatron_core": "megatron.core", "qalora_group_size": 16, "init_lora_weights": True,
}  # fmt: skip
HIDDEN, LAYERS = 32, 2
LAYER, HEAD = "base_model.model.model.layers.", "base_model.model.score.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    new_model(folder, layers=LAYERS, hidden=HIDDEN, heads=4, kv_heads=2, ffn=64, alphabet="0123456789+=")
    return folder


def tensors() -> dict[str, torch.Tensor]:
    """Of queries and values, which are half as wide, of each layer, and a head."""
    found = {HEAD: torch.ones(1, HIDDEN)}
    for layer in range(LAYERS):
        for name, width in {"q_proj": HIDDEN, "v_proj": HIDDEN // 2}.items():
            module = f"{LAYER}{layer}.self_attn.{name}"
            found |= {f"{module}.lora_A.weight": torch.ones(2, HIDDEN)}
            found |= {f"{module}.lora_B.weight": torch.ones(width, 2)}
    return found


def written(folder: Path, config: Mapping[str, Any], stored: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(stored), folder / "adapter_model.safetensors")
    return folder


def graph_of(base: Path, adapter: Path, *more: str) -> Graph:
    changes = [f"params.model={base}", f"models.reward.path={base}", f"models.reward.adapter.path={adapter}"]
    return hflow.load("ppo", [*changes, "models.actor.adapter=4", *more])


def compiled(base: Path, adapter: Path, *more: str) -> Plan:
    return hflow.compile(graph_of(base, adapter, *more), "local1")


def refused(base: Path, adapter: Path, *more: str) -> tuple[str, str]:
    with pytest.raises(HflowError) as error:
        compiled(base, adapter, *more)
    (found,) = error.value.diagnostics
    assert found.code == "HF230" and found.span
    return found.message, found.help


def test_rank_alpha_and_targets_are_the_files(base: Path, tmp_path: Path) -> None:
    plan = compiled(base, written(tmp_path, CONFIG, tensors()))
    assert plan.shapes["reward"].adapter == Adapter(2, 6.0, ("q_proj", "v_proj"))
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert {*plan.digests.models[str(tmp_path)]} == {"adapter_config.json", "adapter_model.safetensors"}


def test_rank_stabilised_scaling_is_a_larger_alpha(base: Path, tmp_path: Path) -> None:
    plan = compiled(base, written(tmp_path, CONFIG | {"use_rslora": True}, tensors()))
    adapter = plan.shapes["reward"].adapter
    assert adapter and adapter.scale == pytest.approx(6 / 2**0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_dora": True}, "`use_dora` is True"),
        ({"rank_pattern": {"q_proj": 4}}, "`rank_pattern` is {'q_proj': 4}"),
        ({"alpha_pattern": {"q_proj": 4}}, "`alpha_pattern`"),
        ({"layers_to_transform": [0]}, "`layers_to_transform` is [0]"),
        ({"layer_replication": [[0, 1]]}, "`layer_replication`"),
        ({"trainable_token_indices": [3]}, "`trainable_token_indices`"),
        ({"lora_bias": True}, "`lora_bias` is True"),
        ({"some_new_variant": {"x": 1}}, "`some_new_variant`"),
        ({"bias": "lora_only"}, "`bias` is 'lora_only'"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights` is 'pissa'"),
        ({"modules_to_save": ["score", "embed_tokens"]}, "`modules_to_save` has 'embed_tokens'"),
        ({"target_modules": ["q_proj", "lm_head"]}, "`target_modules` has 'lm_head'"),
        ({"target_modules": ".*_proj"}, "`target_modules` is the pattern '.*_proj'"),
        ({"target_modules": []}, "`target_modules` names no module"),
        ({"peft_type": "IA3"}, "`peft_type` is 'IA3'"),
        ({"r": 0}, "`r` is 0"),
        ({"lora_alpha": -1}, "`lora_alpha` is -1"),
        ({"lora_alpha": "much"}, "`lora_alpha` is 'much'"),
    ],
)
def test_what_no_adapter_has_is_refused_by_its_key(
    base: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    message, _ = refused(base, written(tmp_path, CONFIG | change, tensors()))
    assert "adapter_config.json" in message and says in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({LAYER + "0.self_attn.q_proj.lora_A.weight": torch.ones(3, HIDDEN)}, "shape (3, 32)"),
        ({LAYER + "1.self_attn.v_proj.lora_B.weight": None}, "there is no tensor"),
        ({LAYER + "2.self_attn.v_proj.lora_B.weight": torch.ones(2, 2)}, "belongs to nothing"),
        ({"base_model.model.lm_head.weight": torch.ones(2, 2)}, "belongs to nothing"),
        ({HEAD: torch.ones(2, HIDDEN)}, "shape (2, 32), the model needs (1, 32)"),
        (
            {LAYER + "0.self_attn.q_proj.lora_A.weight": torch.ones(2, HIDDEN).to(torch.int8)},
            "is I8; weights are one of",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    base: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], says: str
) -> None:
    stored = {name: values for name, values in (tensors() | change).items() if values is not None}
    message, _ = refused(base, written(tmp_path, CONFIG, stored))
    assert says in message and next(iter(change)) in message


def test_a_head_is_not_passed_over(base: Path, tmp_path: Path) -> None:
    written(tmp_path, CONFIG, tensors())
    message, help_ = refused(base, tmp_path, f"models.actor.adapter={{path: {tmp_path}}}")
    assert "there is a scalar head" in message and help_ == "write `head: scalar`"


def test_missing_and_broken_files_are_told(base: Path, tmp_path: Path) -> None:
    assert "no file" in refused(base, tmp_path / "none")[0]
    folder = written(tmp_path, CONFIG, tensors())
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 40)
    assert "no safetensors file" in refused(base, folder)[0]
    (folder / "adapter_model.safetensors").unlink()
    assert "no file" in refused(base, folder)[0]
    (folder / "adapter_config.json").write_text("[]")
    assert "no JSON object" in refused(base, folder)[0]


def test_what_is_said_again_must_be_so(base: Path, tmp_path: Path) -> None:
    folder = written(tmp_path, CONFIG, tensors())
    same = ["models.reward.adapter.rank=2", "models.reward.adapter.alpha=6"]
    plan = compiled(base, folder, *same, "models.reward.adapter.targets=[v_proj, q_proj]")
    assert plan.shapes["reward"].adapter == Adapter(2, 6.0, ("q_proj", "v_proj"))
    message, help_ = refused(base, folder, "models.reward.adapter.rank=8")
    assert "`adapter.rank` 8" in message and message.endswith("2") and help_ == "leave out `rank`"
    assert "q_proj, v_proj" in refused(base, folder, "models.reward.adapter.targets=[q_proj]")[0]


def test_files_pictures_and_builder_say_the_same(base: Path) -> None:
    graph = graph_of(base, Path("adapters/a"), "models.reward.base=actor", "models.reward.adapter.alpha=8")
    assert graph.model("reward").adapter == StoredAdapter("adapters/a", alpha=8.0)
    assert load_text(to_yaml(graph)) == graph
    assert "adapter(adapters/a, alpha=8) base(actor)" in ir(graph)
    labels = [label.content for chip in legend(graph, 900)[0] for label in chip.texts]
    assert "scalar head, adapter from adapters/a frozen beside actor's base" in labels
    g = GraphBuilder("stored", steps=1)
    g.model("actor", path="models/tiny", adapter_path="adapters/a")
    assert "adapter: {path: adapters/a}" in g.yaml()


def test_a_resumed_run_keeps_its_own(base: Path, tmp_path: Path) -> None:
    """The adapter that a run trains is its checkpoint's; another one of a reward model is another judge."""
    old, new = (
        graph_of(base, tmp_path / name, f"models.actor.adapter={{path: {tmp_path / name}}}") for name in "ab"
    )
    for model, text in (("actor", "used whatever the path says"), ("reward", "another model judges")):
        assert is_possible(f"models.{model}.adapter.path", old, new)
        assert text in meaning(f"models.{model}.adapter.path", old, new)


def test_a_server_that_would_begin_without_it_is_refused(base: Path, tmp_path: Path) -> None:
    """It reads the model's folder, and is sent adapters with the newest weights alone."""
    stored = {name: values for name, values in tensors().items() if "score" not in name}
    folder = written(tmp_path, CONFIG | {"modules_to_save": None}, stored)
    engines = ("rollout=sglang",)
    own = f"models.actor.adapter={{path: {folder}}}"
    changes = [f"params.model={base}", own]
    assert hflow.compile(hflow.load("grpo", changes), "local1", engines=engines)
    with pytest.raises(HflowError, match=r"HF310[\s\S]*begins with the adapter"):
        lagging = hflow.load(
            "grpo", [*changes, "nodes.rollout.model={use: actor, lag: 1}", "nodes.actor_train.with.max_lag=1"]
        )
        hflow.compile(lagging, "local1", engines=engines)


def test_all_targets_are_known_by_their_last_name(base: Path, tmp_path: Path) -> None:
    """As PEFT writes `all-linear` of small models: one name for each module."""
    named = [f"model.layers.{i}.self_attn.{name}" for i in range(LAYERS) for name in ("q_proj", "v_proj")]
    plan = compiled(base, written(tmp_path, CONFIG | {"target_modules": named}, tensors()))
    assert plan.shapes["reward"].adapter == Adapter(2, 6.0, ("q_proj", "v_proj"))
    some = named[:2] + named[3:]
    fewer = {n: v for n, v in tensors().items() if "layers.1.self_attn.q_proj" not in n}
    message, help_ = refused(base, written(tmp_path, CONFIG | {"target_modules": some}, fewer))
    assert "there is no tensor" in message and "every layer" in help_
