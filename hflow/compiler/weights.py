"""A model's parameters under their HF names, and where each lies for a (pp, tp) mesh.

Everything that moves weights (train -> generate, import, export) speaks of HF parameters. Fused
tensors of an engine (QKV, gate-up) do not exist here, so resharding needs no special case for them;
an engine maps each HF row range to its own storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hflow.compiler.layout import Box, Layout, Mesh, Only, Placement, Replicate, Shard, split, volume
from hflow.compiler.shape import ModelShape
from hflow.compiler.sharding import Sharding

SCALAR_HEAD = "score.weight"


@dataclass(frozen=True)
class Parameter:
    """`shard` is the dim split over tp (None: whole on every tp rank); `layer` is None for the
    parameters outside the layers, which `ends` places on the first and/or last pipeline stage. `expert`:
    the number of the expert that it belongs to."""

    name: str
    shape: tuple[int, ...]
    shard: int | None
    layer: int | None = None
    ends: tuple[bool, bool] = (False, False)
    expert: int | None = None

    @property
    def size(self) -> int:
        return prod(self.shape)


@lru_cache(maxsize=256)
def parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """All parameters of a model, in the order of the forward pass.

    A scalar head is one row, ``score.weight``, as in transformers' ``…ForSequenceClassification``.
    """
    vocab = (shape.vocab, shape.hidden)
    embedding = Parameter("model.embed_tokens.weight", vocab, 0, None, (True, shape.tied))
    norm = Parameter("model.norm.weight", (shape.hidden,), None, None, (False, True))
    head = Parameter("lm_head.weight", vocab, 0, None, (False, True))
    if shape.head == "scalar":
        head = Parameter(SCALAR_HEAD, (1, shape.hidden), None, None, (False, True))
    layers = tuple(p for i in range(shape.num_layers) for p in _layer(shape, i))
    return (embedding, *layers, norm) if shape.tied else (embedding, *layers, norm, head)


def _layer(shape: ModelShape, index: int) -> tuple[Parameter, ...]:
    h = shape.hidden
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    at = f"model.layers.{index}."
    rows = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    out = [Parameter(f"{at}input_layernorm.weight", (h,), None, index)]
    for name, size in rows.items():
        out.append(Parameter(f"{at}{name}.weight", (size, h), 0, index))
        if shape.qkv_bias:
            out.append(Parameter(f"{at}{name}.bias", (size,), 0, index))
    if shape.qk_norm:  # one weight for all heads
        out.extend(Parameter(f"{at}self_attn.{n}_norm.weight", (shape.head_dim,), None, index) for n in "qk")
    out.append(Parameter(f"{at}self_attn.o_proj.weight", (h, q), 1, index))
    out.append(Parameter(f"{at}post_attention_layernorm.weight", (h,), None, index))
    if shape.moe is None:
        return (*out, *_mlp(f"{at}mlp.", h, shape.ffn, index))
    out.append(Parameter(f"{at}mlp.gate.weight", (shape.moe.num_experts, h), None, index))
    for expert in range(shape.moe.num_experts):
        out.extend(_mlp(f"{at}mlp.experts.{expert}.", h, shape.moe.ffn, index, expert))
    return tuple(out)


def _mlp(at: str, hidden: int, ffn: int, layer: int, expert: int | None = None) -> tuple[Parameter, ...]:
    return (
        Parameter(f"{at}gate_proj.weight", (ffn, hidden), 0, layer, expert=expert),
        Parameter(f"{at}up_proj.weight", (ffn, hidden), 0, layer, expert=expert),
        Parameter(f"{at}down_proj.weight", (hidden, ffn), 1, layer, expert=expert),
    )


def stage_layers(num_layers: int, pp: int, stage: int) -> range:
    """The layers of a pipeline stage; hflow requires an even split."""
    per_stage = num_layers // pp
    return range(stage * per_stage, (stage + 1) * per_stage)


def weight_layouts(shape: ModelShape, mesh: Mesh, parameter: Parameter) -> tuple[Layout, ...]:
    """Where `parameter` lies on `mesh`: one layout for each pipeline stage that holds it."""
    over_tp: Placement = Replicate() if parameter.shard is None else Shard(parameter.shard)
    return tuple(
        Layout(mesh, (Only(stage), Replicate(), over_tp)) for stage in stages_of(shape, mesh.pp, parameter)
    )


@lru_cache(maxsize=4096)
def stage_elements(shape: ModelShape, pp: int, tp: int) -> int:
    """Elements that a device of the fullest pipeline stage holds."""
    stages = [0] * pp
    for parameter in parameters(shape):
        local = parameter.size // (1 if parameter.shard is None else tp)
        for stage in stages_of(shape, pp, parameter):
            stages[stage] += local
    return max(stages)


def stages_of(shape: ModelShape, pp: int, parameter: Parameter) -> tuple[int, ...]:
    """The pipeline stages that hold `parameter`."""
    if parameter.layer is not None:
        return (parameter.layer * pp // shape.num_layers,)
    return tuple(sorted({s for s, on in zip((0, pp - 1), parameter.ends) if on}))


def weight_boxes(shape: ModelShape, sharding: Sharding, parameter: Parameter) -> dict[int, Box]:
    """The box of `parameter` that each device holds; devices without a part are absent."""
    mesh = sharding.mesh
    boxes: dict[int, Box] = {}
    for layout in weight_layouts(shape, mesh, parameter):
        boxes.update(layout.boxes(parameter.shape))
    if parameter.expert is not None and sharding.ep > 1:
        assert shape.moe
        part = parameter.expert * sharding.ep // shape.moe.num_experts
        boxes = {d: box for d, box in boxes.items() if mesh.coordinates(d)["dp"] % sharding.ep == part}
    if sharding.fully:
        boxes = {d: (split(box[0], mesh.dp, mesh.coordinates(d)["dp"]), *box[1:]) for d, box in boxes.items()}
    return {d: box for d, box in boxes.items() if volume(box)}
