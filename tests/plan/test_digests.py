"""What a plan knows of the files that it was compiled with, and what it notices of their changes."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.plan.digests import (
    Digests,
    changed_functions,
    changed_models,
    check_models,
    digests_of,
    function_files,
    model_digests,
)
from hflow.plan.plan import Plan, to_json
from hflow.plan.plan_file import load_plan
from hflow.view.terminal.compiled_files import files_json, files_text
from tests.model_folder import CONFIG

REWARD = """
from hflow.ops.op import op

@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def right(text, answer):
    return [[float(one == want) for one in texts] for texts, want in zip(text, answer)]
"""


def safetensors(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensors(dtype: str = "F32") -> dict[str, Any]:
    return {"lm_head.weight": {"dtype": dtype, "shape": [2], "data_offsets": [0, 8]}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(tensors(), bytes(8)))
    return folder


@pytest.fixture
def plan(model: Path, tmp_path: Path) -> Plan:
    """GRPO with a reward from a file of the user's."""
    (tmp_path / "rewards.py").write_text(REWARD)
    base = Path("algorithms/grpo.yaml").absolute()
    child = f"hflow: 1\nextends: {base}\nname: mine\nnodes: {{reward: {{fn: ./rewards.py:right}}}}\n"
    (tmp_path / "graph.yaml").write_text(child)
    return hflow.compile(hflow.load(tmp_path / "graph.yaml", [f"params.model={model}"]), "local1")


def set_key(name: str, **changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def to_index(folder: Path) -> None:
    """The same tensors in parts."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (set_key("config.json", rope_theta=99.0), "`config.json`"),
        (set_key("config.json", rms_norm_eps=0.01), "`config.json`"),
        (set_key("tokenizer.json", version="2"), "`tokenizer.json`"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "`tokenizer.json` cannot be read"),
        (
            lambda f: (f / "model.safetensors").write_bytes(safetensors(tensors("BF16"), bytes(8))),
            "`model.safetensors`",
        ),
        (to_index, "`model.safetensors` cannot be read"),
    ],
)
def test_a_changed_model_is_told(
    plan: Plan, model: Path, change: Callable[[Path], object], told: str
) -> None:
    check_models(plan.graph, plan.digests)
    change(model)
    with pytest.raises(HflowError) as caught:
        check_models(plan.graph, plan.digests)
    (problem,) = caught.value.diagnostics
    folder = f"models `actor`, `ref`: `{model}` has changed since the graph was compiled: "
    assert (problem.code, problem.message) == ("HF406", folder + told)
    assert (
        problem.span and problem.span.file.endswith("grpo.yaml") and "compile the graph again" in problem.help
    )


def test_everything_of_a_folder_is_told_at_once(plan: Plan, model: Path) -> None:
    set_key("config.json", rope_theta=1.0)(model)
    set_key("tokenizer.json", version="2")(model)
    (problem,) = changed_models(plan.graph, plan.digests)
    assert problem.message.endswith("`config.json`, `tokenizer.json`")


def test_of_weights_the_header_counts(plan: Plan, model: Path) -> None:
    """Further training of the same model needs no other plan."""
    (model / "model.safetensors").write_bytes(safetensors(tensors(), b"\1" * 8))
    check_models(plan.graph, plan.digests)


@pytest.mark.parametrize("content", [b"", b"\1", b"\xff" * 20])
def test_damaged_weights_have_a_digest_too(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert model_digests(model).keys() == {"config.json", "tokenizer.json", "model.safetensors"}


def test_of_weights_in_parts_the_index_counts(model: Path) -> None:
    to_index(model)
    before = model_digests(model)
    assert before.keys() == {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    set_key("model.safetensors.index.json", weight_map={})(model)
    assert model_digests(model) != before


def test_what_was_not_there_is_not_compared(model: Path, plan: Plan) -> None:
    """Plans are made where there are no weights, and run where there are."""
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    bare = replace(plan, digests=digests_of(plan.graph))
    (model / "model.safetensors").write_bytes(weights)
    check_models(bare.graph, bare.digests)


def test_a_folder_that_is_not_here_is_left_to_the_workers(model: Path, plan: Plan) -> None:
    model.rename(model.parent / "elsewhere")
    check_models(plan.graph, plan.digests)


def test_named_shapes_have_no_files() -> None:
    graph = hflow.load("algorithms/grpo.yaml", ["params.model=shape:llama-7b"])
    assert digests_of(graph).models == {}


def test_the_hash_is_over_decisions_only(plan: Plan, tmp_path: Path) -> None:
    """Two machines with other weights and the same graph have the same plan."""
    other = replace(plan, digests=Digests({}, {}))
    assert other.hash == replace(plan, version=8).hash == plan.hash
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p.update(version=6), "has plan version 6; this hflow reads version 7"),
        (lambda p: p.pop("digests"), "digests"),
        (lambda p: p["digests"]["models"].clear(), "no digest of"),
    ],
)
def test_a_plan_without_digests_is_refused(
    plan: Plan, tmp_path: Path, edit: Callable[[Any], object], message: str
) -> None:
    written = json.loads(to_json(plan))
    edit(written)
    (tmp_path / "plan.json").write_text(json.dumps(written))
    with pytest.raises(HflowError) as caught:
        load_plan(tmp_path / "plan.json")
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF306" and message in problem.message
    assert problem.help == "compile the graph again"


def test_functions_and_their_files(plan: Plan, tmp_path: Path) -> None:
    found = {f.reference: f for f in function_files(plan.graph, plan.digests)}
    mine = next(r for r in found if r.endswith("rewards.py:right"))
    assert found.keys() == {
        mine,
        "hflow.ops.advantages.group_normalise",
        "hflow.ops.losses.ppo_clip",
    }
    assert found[mine].nodes == ("reward",) and found[mine].file == tmp_path / "rewards.py"
    assert {f.state for f in found.values()} == {"same"}
    assert found["hflow.ops.losses.ppo_clip"].file == Path("hflow/ops/losses.py").absolute()


def test_a_changed_function_is_a_warning(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    assert list(changed_functions(plan.graph, plan.digests)) == []
    file.write_text(REWARD + "# more\n")
    (warning,) = changed_functions(plan.graph, plan.digests)
    assert (warning.code, warning.severity) == ("HF306", "warning")
    assert warning.message == f"`{file}` has changed since the graph was compiled"
    assert "rewards.py:right" in warning.help and warning.span
    file.unlink()
    (warning,) = changed_functions(plan.graph, plan.digests)
    assert warning.message == f"`{file}` cannot be read"


def test_a_function_that_was_not_found_is_not_compared(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").unlink()
    bare = digests_of(plan.graph)
    (tmp_path / "rewards.py").write_text(REWARD)
    states = {f.nodes: f.state for f in function_files(plan.graph, bare)}
    assert states[("reward",)] == "unknown" and states[("advantages",)] == "same"
    assert list(changed_functions(plan.graph, bare)) == []


CHAT = """
hflow: 1
name: told
params: {model: ""}
models: {actor: {path: "${ model }"}}
loop: {name: step, times: 1}
nodes:
  rows:
    op: data
    with:
      dataset: rows.jsonl
      batch: 2
      messages: messages
      chat_template: FOLDER/mine.jinja
      tools: FOLDER/tools.json
      tokenizer: actor
      max_prompt_tokens: 8
    out: {prompt: "i32[batch, prompt~]"}
  rollout: {op: generate, model: actor, in: {prompt: rows.prompt}, with: {n: 1, max_new_tokens: 4}}
"""


@pytest.fixture
def told(model: Path, tmp_path: Path) -> Plan:
    """Prompts by a chat template and tools from files of the user's."""
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}")
    (tmp_path / "tools.json").write_text("[]")
    (tmp_path / "told.yaml").write_text(CHAT.replace("FOLDER", str(tmp_path)))
    return hflow.compile(hflow.load(tmp_path / "told.yaml", [f"params.model={model}"]), "local1")


@pytest.mark.parametrize("name", ["mine.jinja", "tools.json"])
def test_files_of_chats_are_compared(told: Plan, tmp_path: Path, name: str) -> None:
    check_models(told.graph, told.digests)
    expected = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert told.digests.chats[str(tmp_path / name)] == expected
    (tmp_path / name).write_text("[{}]")
    with pytest.raises(HflowError) as caught:
        check_models(told.graph, told.digests)
    (problem,) = caught.value.diagnostics
    changed = f"`rows`: `{tmp_path / name}` has changed since the graph was compiled"
    assert (problem.code, problem.message) == ("HF406", changed)
    assert problem.span and problem.help and changed in " ".join(files_text(told, 999).split())
    found = {f["file"]: f["state"] for f in files_json(told)["chat_files"]}
    assert sorted(found.values()) == ["changed", "same"] and found[str(tmp_path / name)] == "changed"
    (tmp_path / name).unlink()
    check_models(told.graph, told.digests)  # who reads it says so; another host need not have it


def test_plans_hold_digests_of_chats_only_where_there_are_any(plan: Plan, told: Plan, tmp_path: Path) -> None:
    assert '"chats"' not in to_json(plan)
    told.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == told
    assert replace(told, digests=Digests({}, {})).hash == told.hash
