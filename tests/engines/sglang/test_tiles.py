"""What is handed to SGLang, without SGLang: fused rows, and a checksum that finds what went wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hflow.graph.adapter import Adapter
from hflow.plan.layout import Mesh
from hflow.plan.parameters import parameters, weight_boxes
from hflow.plan.read_shape import read_shape
from hflow.plan.sharding import Sharding
from hflow.runtime.element_bits import checksum
from hflow.runtime.engines.sglang import tiles, weights
from hflow.runtime.engines.sglang.tiles import header, load_tiles, tile
from tests.engines.models import Folders, load_hf, named_in_files

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Shard(nn.Module):
    """Parameters under SGLang's names, which nn.Module itself does not allow."""

    def __init__(self, values: dict[str, torch.Tensor]):
        super().__init__()
        self.values = {name: nn.Parameter(torch.zeros_like(value)) for name, value in values.items()}

    def named_parameters(self, *_args: object, **_options: object):  # type: ignore[override]
        return iter(self.values.items())


def split(value: torch.Tensor, name: str, tp: int, rank: int) -> torch.Tensor:
    """As Megatron and SGLang cut it: columns of o and down, rows of others; no norms and no routers. Of two
    heads of keys and values four ranks have one each."""
    if "norm" in name:
        return value
    if name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
        return value
    if name.split(".")[-2] in ("k_proj", "v_proj") and tp == 4:
        return value.chunk(2)[rank // 2]
    return value.chunk(tp, 1 if name.split(".")[-2] in ("o_proj", "down_proj", "w2") else 0)[rank]


def expected(full: dict[str, torch.Tensor], tp: int, rank: int) -> dict[str, torch.Tensor]:
    """SGLang's parameters: the parts of what it fuses, one below the other."""
    parts = {name: split(value, name, tp, rank) for name, value in full.items()}
    for name in [n for n in parts if ".experts.0." in n and n.split(".")[-2] in ("down_proj", "w2")]:
        parts |= of_experts(parts, *name.removesuffix(".weight").split(".experts.0."))
    for name in [n for n in parts if any(f".{p}." in n for inner in FUSED.values() for p in inner)]:
        block, module, kind = name.rsplit(".", 2)
        fused, inner = next((f, i) for f, i in FUSED.items() if module in i)
        if all(f"{block}.{each}.{kind}" in parts for each in inner):
            together = [parts.pop(f"{block}.{each}.{kind}") for each in inner]
            parts[f"{block}.{fused}.{kind}"] = torch.cat(together)
    return parts


def of_experts(parts: dict[str, torch.Tensor], at: str, down: str) -> dict[str, torch.Tensor]:
    """All experts of a layer, taken from `parts`: gate above up, and down."""
    at += ".experts"
    gate, up = ("w1", "w3") if down == "w2" else ("gate_proj", "up_proj")
    wide: list[torch.Tensor] = []
    narrow: list[torch.Tensor] = []
    while f"{at}.{len(wide)}.{down}.weight" in parts:
        own = f"{at}.{len(wide)}."
        wide.append(torch.cat([parts.pop(f"{own}{module}.weight") for module in (gate, up)]))
        narrow.append(parts.pop(f"{own}{down}.weight"))
    return {f"{at}.w13_weight": torch.stack(wide), f"{at}.w2_weight": torch.stack(narrow)}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen2", "llama llama3", "mistral full", "qwen3", "mixtral", "qwen3_moe"])
def test_every_parameter_lands_where_sglang_keeps_it(folders: Folders, family: str, tp: int) -> None:
    folder = folders.of(family, tied=False)
    shape, full = read_shape(folder), named_in_files(folder, load_hf(folder).state_dict().items())
    sharding = Sharding(Mesh.of(tuple(range(tp)), tp=tp))
    for rank in range(tp):
        boxes = {p.name: weight_boxes(shape, sharding, p)[rank] for p in parameters(shape)}
        parts = {n: full[n][tuple(slice(a, b) for a, b in box)] for n, box in boxes.items()}
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        text = header([tile(n, tuple(part.shape), shape, tp) for n, part in parts.items()], flat)
        wanted = expected(full, tp, rank)
        shard = Shard(wanted)
        load_tiles(shard, [(text, flat)])
        for name, value in wanted.items():
            assert torch.equal(shard.values[name], value), name


def test_buckets_hold_everything_once(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_shape(folders.of("qwen2", tied=False))
    monkeypatch.setattr(weights, "BUCKET_ELEMENTS", 5000)
    found = weights.buckets(shape, 2)
    assert [name for names in found for name in names] == [p.name for p in parameters(shape)]
    size = {p.name: p.size // (1 if p.shard is None else 2) for p in parameters(shape)}
    assert len(found) > 3
    assert all(len(names) == 1 or sum(map(size.__getitem__, names)) <= 5000 for names in found)


def test_an_adapter_lies_beside_what_sglang_fuses(folders: Folders) -> None:
    adapter = Adapter(2, 4.0, ("k_proj", "up_proj", "down_proj"))
    shape = replace(read_shape(folders.of("qwen2", tied=False)), adapter=adapter, num_layers=1)
    names = weights.buckets(shape, 1)
    assert [tile(name, (2, 3), shape, 1).parameter for name in chain.from_iterable(names)] == [
        f"model.layers.0.{module}.lora_{half}.weight"
        for module in (
            "self_attn.qkv_proj.adapter.k_proj", "mlp.gate_up_proj.adapter.up_proj",
            "mlp.down_proj.adapter.down_proj",
        )
        for half in "AB"
    ]  # fmt: skip


def test_what_does_not_fit_is_refused() -> None:
    shard = Shard({"a.weight": torch.zeros(4, 3)})
    flat = torch.arange(6.0)
    load_tiles(shard, [(header([tiles.Tile("a.weight", 1, (2, 3))], flat), flat)])
    assert shard.values["a.weight"].tolist() == [[0, 0, 0], [0, 1, 2], [3, 4, 5], [0, 0, 0]]
    half = header([tiles.Tile("a.weight", 1, (1, 3), 1)], flat[:3])
    load_tiles(shard, [(half, flat[:3])])
    assert shard.values["a.weight"].tolist() == [[0, 0, 0], [0, 1, 2], [3, 4, 5], [0, 1, 2]]
    for start, shape, values in ((3, (2, 3), flat), (0, (3, 4), flat), (0, (2, 3), flat.bfloat16())):
        with pytest.raises(ValueError, match=r"`a.weight` has"):
            load_tiles(shard, [(header([tiles.Tile("a.weight", start, shape)], values), values)])


def test_only_zeros_are_left_as_they_are() -> None:
    shard, flat = Shard({"a.weight": torch.zeros(2, 3)}), torch.arange(1.0, 5.0)
    text = header([tiles.Tile("a.weight", 0, (2, 2))], flat)
    load_tiles(shard, [(text, flat)])
    assert shard.values["a.weight"].tolist() == [[1, 2, 0], [3, 4, 0]]
    shard.values["a.weight"].data[1, 2] = 9
    with pytest.raises(ValueError, match="not filled up with zeros"):
        load_tiles(shard, [(text, flat)])


def test_other_values_than_were_sent_are_refused() -> None:
    shard, flat = Shard({"a.weight": torch.zeros(2, 3)}), torch.arange(6.0)
    text = header([tiles.Tile("a.weight", 0, (2, 3))], flat)
    with pytest.raises(ValueError, match="another checksum"):
        load_tiles(shard, [(text, flat + 2**-20)])
    assert set(json.loads(text)) == {"tiles", "checksum"}


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40), st.data())
def test_a_checksum_tells_values_and_their_order(values: list[float], data: st.DataObject) -> None:
    whole = torch.tensor(values)
    cut = data.draw(st.integers(0, len(values)))
    assert checksum([whole[:cut], whole[cut:]]) == checksum([whole])
    i, j = data.draw(st.permutations(range(len(values))))[:2]
    swapped = whole.clone()
    swapped[[i, j]] = whole[[j, i]]
    same = torch.equal(swapped.view(torch.int32), whole.view(torch.int32))
    assert (checksum([swapped]) == checksum([whole])) == same
