"""Named shapes have the sizes that were published, and transformers builds the same models from them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.diagnostics import HflowError, Span
from hflow.plan.families.registry import RUNNING
from hflow.plan.file_tensors import file_tensors
from hflow.plan.flops import matmul_parameters
from hflow.plan.model_shape import ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import active_parameters, num_parameters, parameters, stage_elements
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.plan.read_shape import read_shape
from hflow.runtime.execute import execute

# Parameters of the published weights; tied embeddings count once.
PUBLISHED = {
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,  # of this and the next two, the text model
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-34b": 33_743_970_304,
    "llama-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # Without the layer that predicts a second token, and with the numbers that correct the router's scores:
    # 671,026,404,352 and 58 * 256 of DeepSeek-V3.
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "glm-4.5": 352_797_829_024,
    "glm-4.5-air": 106_852_251_264,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def test_every_shape_has_its_published_size() -> None:
    assert {name: num_parameters(shape) for name, shape in NAMED_SHAPES.items()} == PUBLISHED


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22)])
def test_active_parameters_are_those_of_the_model_cards(name: str, billions: float) -> None:
    assert active_parameters(NAMED_SHAPES[name]) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3", 37),
        ("kimi-k2", 32.6),
        ("glm-4.5", 32),
        ("glm-4.5-air", 12),
        ("gpt-oss-20b", 3.61),
        ("gpt-oss-120b", 5.13),
    ],
)
def test_a_token_is_multiplied_by_as_much_as_the_cards_say(name: str, billions: float) -> None:
    """Rounded there, and here without the embedding table."""
    assert matmul_parameters(NAMED_SHAPES[name]) / 1e9 == pytest.approx(billions, rel=0.07)


def test_latent_attention_caches_what_was_published() -> None:
    """70.272 KB per token (arXiv:2505.09343, table 1), whole on every rank."""
    shape = NAMED_SHAPES["deepseek-v3"]
    assert shape.kv_bytes_per_token(2) == shape.kv_bytes_per_token(2, tp=8) == 70_272
    assert NAMED_SHAPES["llama-3.1-405b"].kv_bytes_per_token(2) == 516_096  # of the same table


@pytest.mark.parametrize(("name", "kib"), [("llama-7b", 512), ("llama-13b", 800), ("llama-70b", 320)])
def test_kv_cache_in_half_precision(name: str, kib: int) -> None:
    """E.g. 7B: k and v of 32 layers x 4,096 x 2 bytes; 70B has 8 kv heads of 128 in 80 layers."""
    assert NAMED_SHAPES[name].kv_bytes_per_token(2) == kib * 1024


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The keys of config.json, from which transformers builds the model."""
    moe, latent = shape.moe, shape.latent
    more: dict[str, Any] = {}
    if moe:
        more |= {"num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.ffn}
        more["norm_topk_prob"] = moe.normalised
        more["n_routed_experts" if moe.shared_ffn else "num_experts"] = moe.num_experts
    if moe and moe.shared_ffn:
        more |= {"n_shared_experts": 1, "first_k_dense_replace": moe.dense_layers}
        more |= {"attention_bias": shape.qkv_bias, "use_qk_norm": shape.qk_norm}
    if moe and moe.biased:
        more["num_local_experts"] = more.pop("num_experts")
    if latent:
        more |= {"q_lora_rank": latent.query_rank, "kv_lora_rank": latent.rank}
        more |= {"qk_rope_head_dim": latent.rotary_dim, "v_head_dim": latent.value_dim}
        more |= {"qk_nope_head_dim": shape.head_dim - latent.rotary_dim}
    if shape.post_norms:
        more |= {"query_pre_attn_scalar": int(shape.query_scalar or shape.head_dim)}
    if shape.family == "phi3":
        more |= {"partial_rotary_factor": (shape.rotary_dim or shape.head_dim) / shape.head_dim}
        more |= {"sliding_window": shape.window and shape.window.size}
        more |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # within any vocabulary
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": latent.rotary_dim if latent else shape.head_dim,
        "intermediate_size": _mlp_width(shape),
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        **more,
    }


def _mlp_width(shape: ModelShape) -> int:
    if shape.moe and shape.moe.dense_layers:
        return shape.moe.dense_ffn
    return shape.moe.ffn if shape.moe and shape.moe.biased else shape.ffn


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED_SHAPES)
def test_transformers_builds_the_same_model(name: str) -> None:
    """Weights by name and shape; of experts, which transformers fuses, their number of elements. It counts
    what corrects scores among the buffers, and knows Kimi K2 as the DeepSeek-V3 that it is."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shape = NAMED_SHAPES[name]
    family = {"kimi_k2": "deepseek_v3"}.get(shape.family, shape.family)
    config = transformers.AutoConfig.for_model(family, **config_of(shape))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    corrections = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    weights = dict(model.named_parameters()) | corrections
    theirs = {n: tuple(p.shape) for n, p in weights.items() if ".experts." not in n}
    assert {t.name: t.shape for t in file_tensors(shape) if ".experts." not in t.name} == theirs
    assert num_parameters(shape) == sum(p.numel() for p in weights.values())


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "glm-4.5", "glm-4.5-air"])
def test_a_file_of_such_a_model_is_its_shape(name: str, tmp_path: Path) -> None:
    shape = NAMED_SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": shape.family, **config_of(shape)}))
    assert read_shape(str(tmp_path)) == shape


def test_the_fullest_stage_is_one_with_experts_in_all_layers() -> None:
    """Of two stages of 46 layers, the first has experts in 43 of them."""
    shape = NAMED_SHAPES["glm-4.5"]
    last = [p for p in parameters(shape) if p.layer is not None and p.layer >= 46]
    outside = [p for p in parameters(shape) if p.layer is None and p.ends[1]]
    assert stage_elements(shape, 2, 1) == sum(p.size for p in (*last, *outside))


# What matters of the published files.
FILES = {
    "llama-3.1-8b": {
        "model_type": "llama", "attention_bias": False, "eos_token_id": 128001, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
    },
    "mistral-7b-v0.1": {
        "model_type": "mistral", "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "mistral-7b-v0.3": {
        "model_type": "mistral", "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32768,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0, "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42,
        "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "vocab_size": 256000,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
        "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "phi-4": {
        "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0,
        "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17920,
        "max_position_embeddings": 16384, "num_attention_heads": 40, "num_hidden_layers": 40,
        "num_key_value_heads": 10, "original_max_position_embeddings": 16384, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000, "sliding_window": None,
        "tie_word_embeddings": False, "vocab_size": 100352,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "attention_bias": False, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
        "max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_is_the_shape_of_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILES[name]))
    assert read_shape(str(tmp_path)) == NAMED_SHAPES[name]


def test_an_unknown_name_has_its_place_and_a_suggestion() -> None:
    place = Span("graph.yaml", 3, 5, 9)
    with pytest.raises(HflowError) as caught:
        read_shape("shape:llama7b", place)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.span) == ("HF303", place)
    assert diagnostic.help == "did you mean `llama-7b`?"


def ppo(actor: str, critic: str, cluster: str) -> Plan:
    overrides = [f"params.model={actor}", f"params.reward_model={critic}", f"models.critic.path={critic}"]
    graph = hflow.load("algorithms/ppo.yaml", overrides)
    return hflow.compile(graph, cluster)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-7b", set()),
        ("llama-3.1-8b", {"scaling"}),
        ("mistral-7b-v0.1", {"window"}),
        ("gpt-oss-20b", {"scaling", "window"}),
    ],
)
def test_a_plan_keeps_scaling_and_windows(tmp_path: Path, name: str, said: set[str]) -> None:
    """And says nothing of them where there are none: the plan is as it was before there were any."""
    graph = hflow.load("algorithms/sft.yaml", [f"params.model=shape:{name}", "models.actor.dtype=bf16"])
    plan = hflow.compile(graph, "a100x8")
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    (shape,) = json.loads((tmp_path / "plan.json").read_text())["shapes"].values()
    assert shape.keys() & {"scaling", "window"} == said


@pytest.mark.slow
def test_models_without_files_are_planned_but_not_run(tmp_path: Path) -> None:
    plan = ppo("shape:llama-7b", "shape:llama-13b", "a100x16")
    assert plan.shapes["actor"] == NAMED_SHAPES["llama-7b"]
    assert plan.shapes["critic"] == NAMED_SHAPES["llama-13b"].with_head("scalar")
    with pytest.raises(HflowError) as caught:
        execute(plan, run_dir=tmp_path / "run")
    found = caught.value.diagnostics
    assert [d.code for d in found] == ["HF406"] * 4  # actor, critic, ref, reward
    assert all("compile only" in d.message and d.span for d in found)
    assert not (tmp_path / "run").exists()


def test_families_without_an_engine_are_not_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = config_of(NAMED_SHAPES["glm-4.5-air"]) | {"num_hidden_layers": 2}
    transformers.AutoConfig.for_model("glm4_moe", **config).save_pretrained(tmp_path / "model")
    graph = hflow.load("algorithms/sft.yaml", [f"params.model={tmp_path / 'model'}"])
    with pytest.raises(HflowError) as caught:
        execute(hflow.compile(graph, "a100x8"), run_dir=tmp_path / "run")
    diagnostic, *others = caught.value.diagnostics
    assert all("no engine runs yet" in other.message for other in others)  # of expert parallelism
    assert diagnostic.code == "HF406" and "family glm4_moe" in diagnostic.message
    assert diagnostic.help == f"families that run: {', '.join(RUNNING)}"
    assert not (tmp_path / "run").exists()


def test_the_documentation_lists_them() -> None:
    """Of a table's row, the first name is whole, and its family goes before the others."""
    _, _, section = Path("docs/plans.md").read_text().partition("## Model shapes\n")
    rows = re.findall(r"^\| (`shape:.*?) \|", section, re.MULTILINE)
    told: list[str] = []
    for first, *others in (re.findall(r"`(?:shape:)?(.*?)`", row) for row in rows):
        told += [first, *(f"{first.partition('-')[0]}-{other}" for other in others)]
    assert sorted(told) == sorted(NAMED_SHAPES)
