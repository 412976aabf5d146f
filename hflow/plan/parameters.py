"""A model's parameters under their HF names, and where each lies for a sharding of the model.

Everything that moves weights (train -> generate, import, export) speaks of HF parameters. Fused
tensors of an engine (QKV, gate-up) do not exist here, so resharding needs no special case for them;
an engine maps each HF row range to its own storage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, cycle
from math import ceil, prod

from hflow.plan.layout import Box, cut, volume
from hflow.plan.model_shape import ModelShape
from hflow.plan.pipeline_stages import stage_of_layer
from hflow.plan.sharding import Sharding

SCALAR_HEAD = "score.weight"
LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"  # after the module that they adapt, as in PEFT
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_GATE_UP_DOWN = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Parameter:
    """`shard` is the dim split over tp (None: whole on every tp rank); `layer` is None for the
    parameters outside the layers, which `ends` places on the first and/or last pipeline stage. `expert`:
    the number of the expert that it belongs to. `kv_heads`: so many key-value heads its rows are of, none of
    which is cut; None: of something else."""

    name: str
    shape: tuple[int, ...]
    shard: int | None
    layer: int | None = None
    ends: tuple[bool, bool] = (False, False)
    expert: int | None = None
    kv_heads: int | None = None

    @property
    def size(self) -> int:
        return prod(self.shape)

    def parts(self, tp: int) -> int:
        """Into how many parts tp splits it. Each lies on as many neighbouring ranks as there are for it."""
        if self.shard is None:
            return 1
        return tp if self.kv_heads is None else min(tp, self.kv_heads)


@lru_cache(maxsize=256)
def parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """All parameters of a model, in the order of the forward pass.

    A scalar head is one row, ``score.weight``, as in transformers' ``…ForSequenceClassification``.
    """
    first, *last = _outside(shape)
    return (first, *(p for i in range(shape.num_layers) for p in _layer(shape, i)), *last)


def _outside(shape: ModelShape) -> tuple[Parameter, ...]:
    """The parameters before and after the layers."""
    vocab = (shape.vocab, shape.hidden)
    embedding = Parameter(EMBEDDING, vocab, 0, None, (True, shape.tied))
    norm = Parameter("model.norm.weight", (shape.hidden,), None, None, (False, True))
    head = Parameter(LM_HEAD, vocab, 0, None, (False, True))
    if shape.head == "scalar":
        head = Parameter(SCALAR_HEAD, (1, shape.hidden), None, None, (False, True))
    return (embedding, norm) if shape.tied else (embedding, norm, head)


def _layer(shape: ModelShape, index: int) -> tuple[Parameter, ...]:
    """Of an adapted matrix the adapter's two come after it."""
    own = _own_of_layer(shape, index)
    return tuple(chain.from_iterable((p, *adapter_of(shape, p)) for p in own)) if shape.adapter else own


def adapter_of(shape: ModelShape, parameter: Parameter) -> tuple[Parameter, ...]:
    """A and B of an adapted matrix, and nothing for other parameters. Of a matrix whose rows are split over
    tp B is, of one whose columns are A: the other one is whole on every rank of tp."""
    module, _, kind = parameter.name.rpartition(".")
    adapter = shape.adapter
    if adapter is None or kind != "weight" or module.rpartition(".")[2] not in adapter.targets:
        return ()
    assert parameter.shard is not None and parameter.expert is None, parameter
    rows, columns = parameter.shape
    a = Parameter(f"{module}.{LORA_A}", (adapter.rank, columns), 1 if parameter.shard else None)
    b = Parameter(f"{module}.{LORA_B}", (rows, adapter.rank), None if parameter.shard else 0)
    b = replace(b, kv_heads=parameter.kv_heads)
    return tuple(replace(p, layer=parameter.layer) for p in (a, b))


def _own_of_layer(shape: ModelShape, index: int) -> tuple[Parameter, ...]:
    h, at = shape.hidden, f"model.layers.{index}."
    out = [Parameter(f"{at}input_layernorm.weight", (h,), None, index)]
    out += _latent_projections(shape, index) if shape.latent else _projections(shape, index)
    out.append(Parameter(f"{at}self_attn.o_proj.weight", (h, shape.attended_width), 1, index))
    if shape.output_bias:
        out.append(Parameter(f"{at}self_attn.o_proj.bias", (h,), None, index))
    if shape.sinks:
        out.append(Parameter(f"{at}self_attn.sinks", (shape.num_heads,), 0, index))
    out.append(Parameter(f"{at}post_attention_layernorm.weight", (h,), None, index))
    if shape.post_norms:
        out += [
            Parameter(f"{at}{n}_feedforward_layernorm.weight", (h,), None, index) for n in ("pre", "post")
        ]
    moe = shape.moe
    if moe is None or index < moe.dense_layers:
        return (*out, *_mlp(f"{at}mlp.", h, moe.dense_ffn if moe else shape.ffn, index))
    routed, names = f"{at}mlp.", GATE_UP_DOWN
    if moe.mixtral_names:
        routed, names = f"{at}block_sparse_moe.", MIXTRAL_GATE_UP_DOWN
    router = "router" if moe.biased else "gate"
    out.append(Parameter(f"{routed}{router}.weight", (moe.num_experts, h), None, index))
    if moe.biased:
        out.append(Parameter(f"{routed}{router}.bias", (moe.num_experts,), None, index))
    if moe.scores_corrected:
        out.append(Parameter(f"{routed}gate.e_score_correction_bias", (moe.num_experts,), None, index))
    for expert in range(moe.num_experts):
        of_one = _mlp(f"{routed}experts.{expert}.", h, moe.ffn, index, expert, names)
        out.extend(chain.from_iterable((p, _bias(p)) for p in of_one) if moe.biased else of_one)
    shared = _mlp(f"{at}mlp.shared_experts.", h, moe.shared_ffn, index) if moe.shared_ffn else ()
    return (*out, *shared)


def _projections(shape: ModelShape, index: int) -> list[Parameter]:
    """To queries, keys and values."""
    at, out = f"model.layers.{index}.self_attn.", list[Parameter]()
    pairs = shape.num_kv_heads
    for name, size, heads in (
        ("q", shape.query_width, None), ("k", shape.key_width, pairs), ("v", shape.value_width, pairs),
    ):  # fmt: skip
        matrix = Parameter(f"{at}{name}_proj.weight", (size, shape.hidden), 0, index, kv_heads=heads)
        out += [matrix, _bias(matrix)] if shape.qkv_bias else [matrix]
    if shape.qk_norm:  # one weight for all heads
        out += [Parameter(f"{at}{n}_norm.weight", (shape.head_dim,), None, index) for n in "qk"]
    return out


def _latent_projections(shape: ModelShape, index: int) -> list[Parameter]:
    """To what queries, keys and values are made of, which every rank of tp does, and from there."""
    latent, at = shape.latent, f"model.layers.{index}.self_attn."
    assert latent
    inside = shape.num_heads * (shape.head_dim - latent.rotary_dim + latent.value_dim)
    return [
        Parameter(f"{at}q_a_proj.weight", (latent.query_rank, shape.hidden), None, index),
        Parameter(f"{at}q_a_layernorm.weight", (latent.query_rank,), None, index),
        Parameter(f"{at}q_b_proj.weight", (shape.query_width, latent.query_rank), 0, index),
        Parameter(
            f"{at}kv_a_proj_with_mqa.weight", (latent.rank + latent.rotary_dim, shape.hidden), None, index
        ),
        Parameter(f"{at}kv_a_layernorm.weight", (latent.rank,), None, index),
        Parameter(f"{at}kv_b_proj.weight", (inside, latent.rank), 0, index),
    ]


def _mlp(
    at: str,
    hidden: int,
    ffn: int,
    layer: int,
    expert: int | None = None,
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> tuple[Parameter, ...]:
    gate, up, down = names
    return (
        Parameter(f"{at}{gate}.weight", (ffn, hidden), 0, layer, expert=expert),
        Parameter(f"{at}{up}.weight", (ffn, hidden), 0, layer, expert=expert),
        Parameter(f"{at}{down}.weight", (hidden, ffn), 1, layer, expert=expert),
    )


def _bias(matrix: Parameter) -> Parameter:
    """Of what a matrix gives; on every rank of tp where its columns are split, not its rows."""
    name = matrix.name.removesuffix("weight") + "bias"
    return replace(matrix, name=name, shape=matrix.shape[:1], shard=None if matrix.shard else 0)


def stages_of(shape: ModelShape, pp: int, parameter: Parameter, vpp: int = 1) -> tuple[int, ...]:
    """The pipeline stages that hold `parameter`."""
    if parameter.layer is not None:
        return (stage_of_layer(shape.num_layers, pp, parameter.layer, vpp),)
    return tuple(sorted({s for s, on in zip((0, pp - 1), parameter.ends) if on}))


def expert_part(shape: ModelShape, ep: int, parameter: Parameter) -> int:
    """Which of `ep` parts holds `parameter`; what belongs to no expert lies on all of them: 0."""
    if parameter.expert is None or shape.moe is None:
        return 0
    return parameter.expert * ep // shape.moe.num_experts


def weight_boxes(shape: ModelShape, sharding: Sharding, parameter: Parameter) -> dict[int, Box]:
    """The box of `parameter` that each device holds; devices without a part are absent."""
    if parameter.expert is not None and sharding.whole_experts:
        return _whole_expert_boxes(shape, sharding, parameter)
    mesh, ep = sharding.mesh, 1 if parameter.expert is None else sharding.ep
    pieces = _pieces(parameter, mesh.tp, mesh.dp // ep if sharding.fully else 1)
    boxes: dict[int, Box] = {}
    for stage in stages_of(shape, mesh.pp, parameter, sharding.vpp):
        for replica in range(expert_part(shape, ep, parameter), mesh.dp, ep):
            boxes.update(zip(mesh.replica(stage, replica), cycle(pieces[replica // ep % len(pieces)])))
    empty = {box for shards in pieces for box in shards if not volume(box)}
    return {device: box for device, box in boxes.items() if box not in empty} if empty else boxes


def _whole_expert_boxes(shape: ModelShape, sharding: Sharding, parameter: Parameter) -> dict[int, Box]:
    """Of a parameter of an expert that tp does not cut."""
    whole: Box = tuple((0, size) for size in parameter.shape)
    part = expert_part(shape, sharding.ep, parameter)
    [stage] = stages_of(shape, sharding.mesh.pp, parameter, sharding.vpp)
    devices = sharding.expert_replicas[stage * sharding.ep + part]
    pieces = len(devices) if sharding.fully else 1
    boxes = {device: cut(whole, 0, pieces, number % pieces) for number, device in enumerate(devices)}
    return {device: box for device, box in boxes.items() if volume(box)}


def _pieces(parameter: Parameter, tp: int, parts: int) -> list[list[Box]]:
    """For each of `parts` (of the rows of a shard) the box of every rank of tp."""
    whole: Box = tuple((0, size) for size in parameter.shape)
    dim, among = parameter.shard, parameter.parts(tp)
    shards = [whole if dim is None else cut(whole, dim, among, rank * among // tp) for rank in range(tp)]
    return [[cut(shard, 0, parts, part) for shard in shards] for part in range(parts)]


@lru_cache(maxsize=256)
def num_parameters(shape: ModelShape) -> int:
    """All parameters of a model."""
    return stage_elements(shape, 1, 1)


def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token meets: of the experts only `top_k` in each layer."""
    if shape.moe is None:
        return num_parameters(shape)
    idle = shape.moe.num_experts - shape.moe.top_k
    return num_parameters(shape) - shape.expert_layers * idle * shape.moe.parameters_of_one(shape.hidden)


@lru_cache(maxsize=4096)
def stage_elements(
    shape: ModelShape,
    pp: int,
    tp: int,
    ep: int = 1,
    fully_over: int = 1,
    without: frozenset[str] = frozenset(),
    vpp: int = 1,
    whole_experts: bool = False,
) -> int:
    """Elements that the fullest device of the fullest pipeline stage holds: the last rank of each axis, which
    gets the larger part of what `split` cannot divide evenly.

    Args:
        ep: the parts of the experts, over so many ranks.
        fully_over: the size of dp, if shards are split over it (`Sharding.fully`).
        without: names of parameters that are not counted.
        vpp: chunks of each stage (`Sharding.vpp`).
        whole_experts: whether tp cuts none of them (`Sharding.whole_experts`).
    """
    sharing = ep // tp if whole_experts else ep  # ranks of dp, which the parts of the experts are spread over

    def local(parameter: Parameter) -> int:
        sizes = list(parameter.shape)
        if parameter.shard is not None and not (whole_experts and parameter.expert is not None):
            sizes[parameter.shard] = ceil(sizes[parameter.shard] / parameter.parts(tp))
        holders = fully_over if parameter.expert is None else max(1, fully_over // sharing)
        return ceil(sizes[0] / holders) * prod(sizes[1:])

    def held(layer: int) -> int:
        here = (p for p in _layer(shape, layer) if not expert_part(shape, ep, p))
        return sum(local(p) for p in here if p.name not in without)

    stages = [0] * pp
    dense = shape.moe.dense_layers if shape.moe else 0
    # Those of one kind are alike, but for what is left out.
    alike = {layer: held(layer) for layer in {0, dense} if layer < shape.num_layers}
    for layer in range(shape.num_layers):
        kind = dense if layer >= dense else 0
        stages[stage_of_layer(shape.num_layers, pp, layer, vpp)] += held(layer) if without else alike[kind]
    for parameter in (p for p in _outside(shape) if p.name not in without):
        for stage in stages_of(shape, pp, parameter):
            stages[stage] += local(parameter)
    return max(stages)
