"""What the engine tests share: tiny HF models, nodes, and engines in the test processes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from hflow.graph.adapter import Adapter
from hflow.graph.ir import Function, Head, Input, Model, Node, Output, Ref, Repeat
from hflow.graph.types import Dim, Factor, ValueType
from hflow.ops.losses import ppo_clip
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.parameters import GATE_UP_DOWN, MIXTRAL_GATE_UP_DOWN
from hflow.plan.read_shape import read_shape
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.megatron.weights import MegatronWeights
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.rows import Rows, from_lists
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.new_model import new_model

ADAM = {
    "lr": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-2,
    "weight_decay": 0.1,
    "clip_grad": 0.0,
    "warmup_steps": 0,
}
EOS = 1
LONGEST_PROMPT, LONGEST_RESPONSE = 7, 6  # of tests' rows
CLASSES: dict[Head, Any] = {"lm": AutoModelForCausalLM, "scalar": AutoModelForSequenceClassification}


# What a variant is called: its family, and the keys of config.json that make it another model.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {
        "sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 24,
    }),
    "gemma3": ("gemma3_text", {
        "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }),
    "llama": ("llama", {}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama llama3": ("llama", {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16, "rope_theta": 500.0,
        },
        "head_dim": 24,
    }),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral full": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "phi3": ("phi3", {"sliding_window": 6, "rope_parameters": {"partial_rotary_factor": 0.75}}),
    "phi3 longrope": ("phi3", {
        "rope_parameters": {
            "rope_type": "longrope", "short_factor": [1.0, 1.0, 1.5, 1.5, 2.0, 3.0, 3.5, 4.0],
            "long_factor": [9.0] * 8,
        },
        "original_max_position_embeddings": 40,
    }),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    }),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3 windows": ("qwen3", {
        "use_sliding_window": True, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "truncate": False,
            "attention_factor": 0.7, "beta_fast": 8.0,
        },
    }),
    "gpt_oss": ("gpt_oss", {
        "sliding_window": 5, "num_local_experts": 4, "swiglu_limit": 0.2,
        "rope_parameters": {"factor": 4.0, "original_max_position_embeddings": 16},
    }),
    "mixtral": ("mixtral", {"num_local_experts": 6}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3}),
    "qwen3_moe probabilities": ("qwen3_moe", {"num_experts": 4, "norm_topk_prob": False}),
}  # fmt: skip


# Beside these, with one pair of keys and values for all heads.
ONE_PAIR: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 one pair": ("qwen2", {"num_key_value_heads": 1}),
    "qwen3 one pair": ("qwen3", {"head_dim": 24, "num_key_value_heads": 1}),
}


@dataclass(frozen=True)
class Folders:
    root: Path

    def of(self, variant: str, tied: bool, head: Head = "lm") -> str:
        """The folder of a model of 4 layers of 64, 4 heads, 2 key-value heads and 32 tokens."""
        folder = self.root / f"{variant.replace(' ', '-')}-{'tied' if tied else 'untied'}-{head}"
        family, changes = (VARIANTS | ONE_PAIR)[variant]
        if not folder.exists():
            new_model(
                folder,
                family=family,
                layers=4,
                hidden=64,
                heads=4,
                kv_heads=2,
                ffn=96,
                alphabet="0123456789+-=*abcdefgh",
                max_positions=64,
                tied=tied,
                head=head,
            )
            _randomise(folder, family, head, changes)
        return str(folder)


def _randomise(folder: Path, family: str, head: Head, changes: dict[str, Any]) -> None:
    """Weights far from their initial values: norms that are not 1, biases that are not 0. The model is that
    of config.json with the `changes`."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("layer_types", None)  # transformers has made it of the other keys
    rotary = {"rope_parameters": config["rope_parameters"] | changes.get("rope_parameters", {})}
    file.write_text(json.dumps({**config, **changes, **rotary}))
    model = CLASSES[head].from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # of Gemma's norms, 1 is added by the model
            whole = "norm" in name and not family.startswith("gemma")
            weight.copy_(torch.randn(weight.shape) * 0.1 + whole)
    model.save_pretrained(folder)


def load_hf(folder: str, dtype: torch.dtype = torch.float32, head: Head = "lm") -> PreTrainedModel:
    """Experts run one after the other: transformers' grouped product is for single precision only. Where
    scores are capped or stand beside sinks, with the only kind of attention that does so."""
    options: dict[str, Any] = {"experts_implementation": "eager"} if read_shape(folder).moe else {}
    if read_shape(folder).explicit_scores:
        options["attn_implementation"] = "eager"
    return CLASSES[head].from_pretrained(folder, dtype=dtype, **options).eval()


def _apart(folder: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors under the names of transformers' parameters, or whatever has their shapes, cut where a family
    has fused several parameters."""
    config = AutoConfig.from_pretrained(folder)
    width = config.hidden_size // config.num_attention_heads
    pairs = config.num_key_value_heads * width
    fused = {
        "qkv_proj": (("q_proj", "k_proj", "v_proj"), [config.num_attention_heads * width, pairs, pairs]),
        "gate_up_proj": (("gate_proj", "up_proj"), [config.intermediate_size] * 2),
    }
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        module = name.split(".")[-2]
        parts, sizes = fused.get(module, ((module,), [len(tensor)]))
        found |= {name.replace(module, part): x for part, x in zip(parts, tensor.split(sizes), strict=True)}
    return found


def named_in_files(folder: str, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Tensors by the names that parameters have: transformers keeps those of all experts as one, and some
    families have fused others."""
    moe, found = read_shape(folder).moe, dict[str, Any]()
    for name, tensor in tensors:
        module, _, kind = name.rpartition(".experts.")
        if not module or not moe:
            found[name] = tensor
            continue
        names = GATE_UP_DOWN
        if moe.biased:
            found |= _of_gpt_oss(module, kind, tensor)
            continue
        if moe.mixtral_names:
            module, names = module.replace("mlp", "block_sparse_moe"), MIXTRAL_GATE_UP_DOWN
        for number, own in enumerate(tensor):
            parts = zip(names[:2], own.chunk(2)) if kind == "gate_up_proj" else [(names[2], own)]
            found |= {f"{module}.experts.{number}.{part}.weight": values for part, values in parts}
    if moe and moe.mixtral_names:
        found = {name.replace(".mlp.gate.", ".block_sparse_moe.gate."): x for name, x in found.items()}
    return _apart(folder, found)


def _of_gpt_oss(module: str, kind: str, tensor: Any) -> dict[str, Any]:
    """``gate_up_proj`` or ``down_proj`` of all experts, transposed, or a bias: gate and up alternate."""
    projection, suffix = kind.removesuffix("_bias"), "bias" if kind.endswith("_bias") else "weight"
    found: dict[str, Any] = {}
    for number, own in enumerate(tensor):
        rows = own if suffix == "bias" else own.T
        if projection == "gate_up_proj":
            parts = {"gate_proj": rows[::2], "up_proj": rows[1::2]}
        else:
            parts = {"down_proj": rows}
        found |= {f"{module}.experts.{number}.{part}.{suffix}": x for part, x in parts.items()}
    return found


def reference_adamw(model: PreTrainedModel, options: dict[str, Any]) -> torch.optim.AdamW:
    """torch's AdamW, which does not decay vectors: some models have those of all experts in one matrix."""
    named = [(p, p.dim() > 1 and not name.endswith("bias")) for name, p in model.named_parameters()]
    decays = [p for p, matrix in named if matrix]
    others = [p for p, matrix in named if not matrix]
    groups = [
        {"params": decays, "weight_decay": options["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options["lr"], betas=options["betas"], eps=options["eps"])


def make_engine(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    train_options: dict[str, Any] | None = None,
    dtype: Any = "f32",
    head: Head = "lm",
    frozen: bool = False,
    strategy: Strategy = PLAIN,
    freeze: tuple[str, ...] = (),
    averaging: tuple[Model, ...] = (),
    adapter: Adapter | None = None,
    base: MegatronWeights | None = None,
) -> MegatronModel:
    """`strategy`: of its train node, or of what else it does. `base`: of another model, whose frozen
    weights it has."""
    model = Model("actor", folder, head, frozen, dtype, adapter=adapter)
    shape, device = replace(read_shape(folder).with_head(head), adapter=adapter), torch.device("cpu")
    tokenizer = load_tokenizer(folder)
    more = tokenizer, device, train_options, strategy, freeze, averaging
    return MegatronModel(model, shape, Sharding.of(mesh, strategy), rank, new_group, *more, base=base)


def read_weights(engine: MegatronModel) -> dict[str, Any]:
    """(box, float32 values) by HF name, of what this rank holds."""
    weights, boxes = engine.weights, {name: engine.weights.box(name) for name in engine.weights.names()}
    return {n: (box, weights.read(n, box).float().numpy().copy()) for n, box in boxes.items()}


def read_training(engine: MegatronModel) -> dict[str, Any]:
    """(box, last gradient, weight) by HF name; the engine's weights are lost."""
    trained = read_weights(engine)
    for parameter in engine.model.parameters():  # read the gradients by the weights' own names
        parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    gradients = read_weights(engine)
    return {n: (box, gradients[n][1], weight) for n, (box, weight) in trained.items()}


def make_call(
    engine: MegatronModel,
    rank: int,
    node: Node,
    rows: int,
    micro_batch: int,
    step: int = 3,
    unit: int = 1,
    stream: int = 0,
    strategy: Strategy = PLAIN,
) -> EngineCall:
    """The call of `node` for this replica's share of `rows` rows, which are in groups of `unit`."""
    mesh = engine.mesh
    start, stop = (unit * at for at in share(mesh, rank, rows // unit))
    plan = NodePlan(node.name, node.op, "actor", "megatron", mesh, micro_batch, 0.0, 0.0, 0, strategy)
    return EngineCall(node, plan, start, stop - start, seed=11, step=step, stream=stream)


def share(mesh: Mesh, rank: int, rows: int) -> tuple[int, int]:
    """Rows of a rank; uneven on purpose where that is possible."""
    index, parts = mesh.coordinates(rank)["dp"], mesh.dp
    cut = lambda i: 0 if i == 0 else min(rows, i * rows // parts + 1) if i < parts else rows  # noqa: E731
    return cut(index), cut(index + 1)


def type_of(rows: int, group: int = 1, longest: int = 64) -> ValueType:
    """Rows of tokens, `group` to a prompt."""
    factors = (Factor("rows", rows // group), Factor("group", group))
    return ValueType("i32", (Dim(factors), Dim((Factor("seq", longest),), True)))


def responses_of(rows: int, group: int = 1) -> tuple[Input, ...]:
    """What says how long rows are at most: prompts of `some_prompts`, and responses."""
    ports = {"tokens": LONGEST_PROMPT + LONGEST_RESPONSE, "mask": LONGEST_RESPONSE}
    return tuple(
        Input(port, Ref("rollout", port), type_of(rows, group, longest)) for port, longest in ports.items()
    )


def train_node(
    rows: int,
    minibatch: int,
    options: dict[str, Any],
    function: Function | None = None,
    epochs: int = 1,
    group: int = 1,
) -> Node:
    defaults = {"aggregate": "token_mean", "temperature": 1.0, "clip": 0.2, "kl_coef": 0.0}
    return Node(
        "actor_train",
        "train",
        function=function or ppo_function(),
        inputs=responses_of(rows, group),
        options=ADAM | defaults | options,
        repeat=Repeat(epochs, minibatch),
    )


def ppo_function() -> Function:
    signature = ppo_clip.__hflow_signature__  # type: ignore[attr-defined]
    return Function("hflow.ops.losses.ppo_clip", signature, {"clip": 0.2, "kl_coef": 0.0}, ("logprobs",))


def generate_node(rows: int, n: int, max_new_tokens: int, temperature: float) -> Node:
    options = {"n": n, "max_new_tokens": max_new_tokens, "temperature": temperature}
    ports = ("tokens", "logprobs", "mask", "text")
    outputs = tuple(Output(port, type_of(rows * n)) for port in ports)
    return Node("rollout", "generate", outputs=outputs, options=options)


def score_node(rows: int, temperature: float) -> Node:
    return Node(
        "ref",
        "score",
        inputs=responses_of(rows),
        outputs=(Output("logprobs", type_of(rows)),),
        options={"temperature": temperature},
    )


@functools.cache
def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Ragged prompts of tokens that are not special."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST_PROMPT + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, 25, (length,), generator=generator).tolist() for length in lengths]


def prompt_rows(prompts: list[list[int]]) -> Rows:
    return from_lists(prompts)
