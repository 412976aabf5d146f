"""A built model's weights as boxes of HF parameters.

Megatron fuses the query, key and value projections, interleaved by query group, and the gate and up
projections; so do hflow's experts, of which a layer has all in one matrix. Along their rows an HF parameter
is therefore a slice of a Megatron parameter, or, for queries, keys and values, a list of rows; along its
columns it is always the Megatron parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from hflow.plan.frozen import moved_parameters
from hflow.plan.layout import Box
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import Parameter, parameters, weight_boxes
from hflow.plan.pipeline_stages import stage_chunks
from hflow.plan.sharding import Sharding
from hflow.runtime.engines.megatron.host import HostMemory, drop
from hflow.runtime.engines.protocol import ModelWeights, Weights


@dataclass(frozen=True)
class ParameterPlace:
    """Where this rank keeps an HF parameter.

    `box` is the part held (global indices). Its row r is row ``start + r // run * stride + r % run`` of
    `parameter`: runs of `run` rows, whose beginnings lie `stride` rows apart.
    """

    parameter: torch.nn.Parameter
    box: Box
    start: int
    run: int
    stride: int

    @property
    def storage(self) -> Tensor:
        """What the parameter holds now: an optimizer that is split, and an onload, put it elsewhere."""
        return self.parameter.data

    def view(self, box: Box) -> Tensor:
        """`box` (global indices) as a view of the storage; of several runs, one dimension more."""
        (first, last), *columns = self._local(box)
        run, offset = divmod(first, self.run)
        if offset + last - first <= self.run:
            at = self.start + run * self.stride + offset
            rows = self.storage[at : at + last - first]
        else:
            assert not offset and not last % self.run, f"{box} cuts a run of {self.run} rows"
            runs = self.storage.unflatten(0, (-1, self.stride))
            rows = runs[run : last // self.run, self.start : self.start + self.run]
        return rows[..., columns[0][0] : columns[0][1]] if columns else rows

    def _local(self, box: Box) -> Box:
        """`box` in indices of the part held."""
        inside = tuple((a - base, b - base) for (a, b), (base, _) in zip(box, self.box))
        held = (end - base for base, end in self.box)
        assert all(0 <= a <= b <= size for (a, b), size in zip(inside, held)), f"{box} is not in {self.box}"
        return inside


class PlacedWeights:
    """Boxes of HF parameters, in the memory where `places` says that they lie."""

    def __init__(self, places: Mapping[str, ParameterPlace]):
        self.places = places
        self.changed = False
        self.version = 0

    def names(self) -> tuple[str, ...]:
        """HF names of the parameters present on this rank, in the order of the forward pass."""
        return tuple(self.places)

    def box(self, name: str) -> Box:
        """The part of the parameter that this rank holds."""
        return self.places[name].box

    def view(self, name: str, box: Box) -> Tensor:
        """The memory of `box` (global indices, inside this rank's part): its elements in order, in whatever
        shape. Several query groups are whole ones. Whoever writes there sets `changed`."""
        return self._place(name).view(box)

    def read(self, name: str, box: Box) -> Tensor:
        """The values in `box`, in its shape; a view where they lie together."""
        return self.view(name, box).reshape([stop - start for start, stop in box])

    def write(self, name: str, box: Box, values: Tensor) -> None:
        """Set the values in `box`, converting them to the model's dtype and device."""
        view = self.view(name, box)
        view.copy_(values.expand([stop - start for start, stop in box]).reshape(view.shape))
        self.changed = True

    def _place(self, name: str) -> ParameterPlace:
        return self.places[name]


class MegatronWeights(PlacedWeights, ModelWeights):
    """The weights of one model on one device.

    They can give their memory back (`release`, `offload`, `donate`) and take it again (`allocate`, `onload`,
    `take_back`). `moved`: the names of those that are ever written again.
    """

    def __init__(self, model: torch.nn.Module, shape: ModelShape, sharding: Sharding, rank: int):
        super().__init__(_places(model, shape, sharding, rank))
        self.shapes = {parameter.name: parameter.shape for parameter in parameters(shape)}
        self.moved = frozenset(parameter.name for parameter in moved_parameters(shape))
        self._parameters = {p: p.shape for p in model.parameters()}
        self._host = HostMemory()
        self._donated: list[tuple[UntypedStorage, int]] = []
        self.present = True

    def release(self) -> None:
        """Drop them: they are undefined until `allocate`d and written again."""
        drop(self._parameters)
        self.present = False

    def allocate(self, keeps_values: bool = False) -> None:
        """See `ModelWeights`."""
        if self.present:
            return
        assert not keeps_values, "what was released has no values"
        for parameter, shape in self._parameters.items():
            parameter.data = parameter.data.new_empty(shape)
        self.present = True

    def donate(self) -> None:
        """Give the memory back while a copy is there that holds all of these weights. Unlike `release` it
        leaves the tensors as they are: the optimizer and its buffers refer to parts of the same storages."""
        storages = {s.data_ptr(): s for s in (p.untyped_storage() for p in self._parameters)}
        self._donated = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._donated:
            storage.resize_(0)
        self.present = False

    def take_back(self, copy: Weights) -> None:
        """Their memory, and their values from the copy."""
        for storage, size in self._donated:
            storage.resize_(size)
        self._donated, self.present = [], True
        for name, place in self.places.items():
            mine = place.view(place.box)
            mine.copy_(copy.view(name, place.box).reshape(mine.shape))

    def offload(self) -> int:
        """Drop them from the device, not from the host, where a copy of what they were first, or were last
        written, stays. Returns bytes copied."""
        if not self.present:
            return 0
        copied = self._host.store(self._parameters) if self.changed or not self._host else 0
        self.changed = False
        self.release()
        return copied

    def onload(self) -> int:
        """Bring them back from the host, unless they are there. Returns bytes copied."""
        if self.present:
            return 0
        self.present = True
        return self._host.restore(self._parameters)

    def _place(self, name: str) -> ParameterPlace:
        if not self.present:
            raise RuntimeError(f"`{name}` is not on this device: its weights were released or offloaded")
        return self.places[name]


def freeze_parameters(weights: MegatronWeights, names: Collection[str]) -> None:
    """Let the HF parameters of some `names` be without gradients. What lies with them in one Megatron
    parameter must be among them."""
    frozen = {place.parameter for name, place in weights.places.items() if name in names}
    others = {place.parameter for name, place in weights.places.items() if name not in names}
    assert not frozen & others, "a Megatron parameter can only be frozen as a whole"
    for parameter in frozen:
        parameter.requires_grad_(False)


def lie_on(base: MegatronWeights, weights: MegatronWeights, names: Collection[str]) -> None:
    """Let the HF parameters of some `names`, all of which `base` has in the same layout, be on its memory.
    What lies with them in one Megatron parameter must be among them."""
    for name in (name for name in weights.names() if name in names):
        place, its = weights.places[name], base.places[name]
        assert place.box == its.box and place.parameter.shape == its.parameter.shape, name
        place.parameter.data = its.parameter.data


def _places(
    model: torch.nn.Module, shape: ModelShape, sharding: Sharding, rank: int
) -> dict[str, ParameterPlace]:
    mesh = sharding.mesh
    at = mesh.coordinates(rank)
    chunks = [f"{number}." for number in range(sharding.vpp)] if sharding.vpp > 1 else [""]
    layers = {
        layer: f"{chunk}decoder.layers.{number}"
        for chunk, own in zip(chunks, stage_chunks(shape.num_layers, mesh.pp, at["pp"], sharding.vpp))
        for number, layer in enumerate(own)
    }
    part = sharding.expert_parts[rank] if shape.moe else 0
    first_expert = part * shape.moe.num_experts // sharding.ep if shape.moe else 0
    held = dict(model.named_parameters())
    places: dict[str, ParameterPlace] = {}
    used: set[str] = set()
    for parameter in parameters(shape):
        box = weight_boxes(shape, sharding, parameter).get(rank)
        if box is not None:
            if parameter.layer is None:
                fused, locate = _outside(parameter, chunks, at["pp"] == 0), _whole
            else:
                fused, locate = _inside(shape, parameter, layers[parameter.layer], first_expert)
            tp = mesh.tp if parameter.expert is None else sharding.expert_tp
            places[parameter.name] = ParameterPlace(held[fused], box, *locate(shape, box, tp))
            used.add(fused)
    assert used == held.keys(), f"no HF parameter for {held.keys() - used}"
    return places


Locate = Callable[[ModelShape, Box, int], tuple[int, int, int]]  # start, run and stride, at a size of tp


def _whole(shape: ModelShape, box: Box, tp: int) -> tuple[int, int, int]:
    return 0, box[0][1] - box[0][0], 0


def _up_rows(shape: ModelShape, box: Box, tp: int) -> tuple[int, int, int]:
    return shape.mlp_width // tp, box[0][1] - box[0][0], 0


def _group_rows(part: int) -> Locate:
    """Rows of the queries (0), keys (1) or values (2) in the fused projection.

    It holds, for each key-value head of this rank, those heads of its queries that the rank has, its key and
    its value.
    """

    def locate(shape: ModelShape, box: Box, tp: int) -> tuple[int, int, int]:
        pairs = shape.num_kv_heads * shape.kv_copies(tp)
        queries, d = shape.num_heads // pairs, shape.head_dim
        sizes = (queries * d, d, d)
        return sum(sizes[:part]), sizes[part], sum(sizes)

    return locate


def _behind(experts: int, module: str, locate: Locate) -> Locate:
    """Rows of an expert, behind those of so many others."""

    def behind(shape: ModelShape, box: Box, tp: int) -> tuple[int, int, int]:
        start, run, stride = locate(shape, box, tp)
        of_each = 2 * shape.mlp_width // tp if module == "linear_fc1" else shape.hidden
        return experts * of_each + start, run, stride

    return behind


# HF module -> (Megatron module, where its rows lie)
OUTSIDE: dict[str, str] = {
    "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
    "score": "output_layer",
}
INSIDE: dict[str, tuple[str, Locate]] = {
    "input_layernorm": ("input_layernorm", _whole),
    "self_attn.q_proj": ("self_attention.linear_qkv", _group_rows(0)),
    "self_attn.k_proj": ("self_attention.linear_qkv", _group_rows(1)),
    "self_attn.v_proj": ("self_attention.linear_qkv", _group_rows(2)),
    "self_attn.q_norm": ("self_attention.q_layernorm", _whole),
    "self_attn.k_norm": ("self_attention.k_layernorm", _whole),
    "self_attn.o_proj": ("self_attention.linear_proj", _whole),
    "self_attn": ("self_attention.core_attention", _whole),  # its sinks
    "post_attention_layernorm": ("pre_mlp_layernorm", _whole),
    "mlp.gate_proj": ("mlp.linear_fc1", _whole),
    "mlp.up_proj": ("mlp.linear_fc1", _up_rows),
    "mlp.down_proj": ("mlp.linear_fc2", _whole),
    "mlp.gate": ("mlp.router", _whole),
    "mlp.router": ("mlp.router", _whole),
    "block_sparse_moe.gate": ("mlp.router", _whole),
}
EXPERT: dict[str, tuple[str, Locate]] = {
    "gate_proj": ("linear_fc1", _whole),
    "up_proj": ("linear_fc1", _up_rows),
    "down_proj": ("linear_fc2", _whole),
    "w1": ("linear_fc1", _whole),
    "w3": ("linear_fc1", _up_rows),
    "w2": ("linear_fc2", _whole),
}


# Of models with norms behind attention and MLP, too.
POST_NORMS: dict[str, tuple[str, Locate]] = {
    "post_attention_layernorm": ("self_attn_bda.norm", _whole),
    "pre_feedforward_layernorm": ("pre_mlp_layernorm", _whole),
    "post_feedforward_layernorm": ("mlp_bda.norm", _whole),
}


def _inside(shape: ModelShape, parameter: Parameter, layer: str, first_expert: int) -> tuple[str, Locate]:
    """The Megatron parameter that holds an HF parameter of a `layer` on this rank, and where in it."""
    module, kind = parameter.name.rsplit(".", 1)
    inside = module.split(".", 3)[3]
    projection, _, half = inside.rpartition(".")
    if half in ("lora_A", "lora_B"):
        target = projection.rpartition(".")[2]
        return f"{layer}.{INSIDE[projection][0]}.adapter.{target}.{half}.{kind}", _whole
    if parameter.expert is not None:
        inner, locate = EXPERT[module.rsplit(".", 1)[1]]
        return f"{layer}.mlp.experts.{inner}.{kind}", _behind(parameter.expert - first_expert, inner, locate)
    inner, locate = (INSIDE | POST_NORMS if shape.post_norms else INSIDE)[inside]
    return f"{layer}.{inner}.{kind}", locate


def _outside(parameter: Parameter, chunks: list[str], first_stage: bool) -> str:
    """The Megatron parameter that holds all of an HF parameter outside the layers. `chunks`: what begins the
    names of each chunk."""
    module, kind = parameter.name.rsplit(".", 1)
    if module != "model.embed_tokens":
        return f"{chunks[-1]}{OUTSIDE[module]}.{kind}"
    if first_stage:
        return f"{chunks[0]}embedding.word_embeddings.weight"
    # With tied embeddings, the last of several stages keeps a copy of its own as output matrix.
    return f"{chunks[-1]}output_layer.weight"
