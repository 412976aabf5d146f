"""Replicas that share experts sample what one process samples, whenever each of them ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hflow.plan.layout import Mesh
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import from_lists
from tests.engines.models import Folders, generate_node, make_call, make_engine, share, some_prompts
from tests.engines.processes import Pool
from tests.engines.test_generate import MESHES, NEW, PROMPTS, SAMPLES, as_lists, digest_of, together

LAYOUTS = {
    "dp2": (MESHES["dp2"], Strategy(ep=2)),
    "dp4 ep2": (Mesh.of((0, 1, 2, 3), dp=4), Strategy(ep=2)),
    "tp2dp2": (MESHES["tp2dp2"], Strategy(ep=2)),
    "tp2dp2 ep4 etp1": (MESHES["tp2dp2"], Strategy(ep=4, whole_experts=True)),
}


def sampled_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    strategy: Strategy,
    prompts: int,
    micro_batch: int,
) -> Any:
    engine = make_engine(rank, new_group, folder, mesh, strategy=strategy)
    call = make_call(engine, rank, generate_node(prompts, SAMPLES, NEW, 1.0), prompts, micro_batch)
    own = from_lists(some_prompts(prompts)).slice(*share(mesh, rank, prompts))
    result = engine.run(call, {"prompt": own})
    rows = {name: as_lists(result.outputs[name]) for name in ("tokens", "logprobs", "mask")}
    return rows, dict(result.metrics), result.digest


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_samples_are_those_of_one_process(pool: Pool, folders: Folders, family: str) -> None:
    """Of 7 prompts, so that replicas have other numbers of rows and of waves; and of one, so that some have
    nothing to sample."""
    folder, ended = folders.of(family, False), set[int]()
    for prompts in (PROMPTS, 1):
        one = together(pool.run(1, sampled_on_rank, folder, MESHES["one"], PLAIN, prompts, 64), MESHES["one"])
        ended |= {len(mask) for mask in one["mask"]}
        for (mesh, strategy), micro_batch in zip(LAYOUTS.values(), (64, 3, 4, 3), strict=True):
            if family == "mixtral" and strategy.ep == 4:
                continue  # it has 6 experts
            how = mesh, strategy, prompts, micro_batch
            results = pool.run(len(mesh.devices), sampled_on_rank, folder, *how)
            found = together(results, mesh)
            assert found["tokens"] == one["tokens"]
            digests = [digest for _, _, digest in results if digest is not None]
            assert sum(digests) % 2**64 == digest_of(one["tokens"])
            for mine, theirs in zip(found["logprobs"], one["logprobs"], strict=True):
                assert mine == pytest.approx(theirs, abs=1e-5)
    assert len(ended) > 1, "some rows end early"


def broken_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh) -> str:
    """What is said, or how many rows were made."""
    engine = make_engine(rank, new_group, folder, mesh, strategy=Strategy(ep=2))
    if rank == 0:
        with torch.no_grad():
            engine.model.decoder.final_layernorm.weight.fill_(torch.nan)  # pyright: ignore
    call = make_call(engine, rank, generate_node(PROMPTS, 1, NEW, 1.0), PROMPTS, 2)
    prompts = from_lists(some_prompts(PROMPTS)).slice(*share(mesh, rank, PROMPTS))
    try:
        return str(len(engine.run(call, {"prompt": prompts}).outputs["tokens"]))
    except NodeError as error:
        return error.code


def test_a_replica_that_fails_leaves_none_waiting(pool: Pool, folders: Folders) -> None:
    folder, mesh = folders.of("qwen3_moe", False), MESHES["dp2"]
    first, end = share(mesh, 1, PROMPTS)
    assert pool.run(2, broken_on_rank, folder, mesh) == ["HF405", str(end - first)]
