"""Why devices have no work: the reason is told where brute force finds no layout on more of them, only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path

import pytest

import hflow
from hflow.compiler.explain.unused_devices import undivided
from hflow.plan.cluster_file import load_cluster
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.plan import Plan
from hflow.view.terminal.remarks import remarks

MODEL = "params.model=shape:qwen2.5-7b"
HEADS, KV_HEADS, LAYERS, GROUP, MINIBATCH, HELD_OUT = 28, 4, 28, 8, 256, 512
DTYPES = ("models.actor.dtype=bf16", "models.ref.dtype=bf16")


def compiled(hosts: int, batch: int, *pins: str) -> Plan:
    cluster = replace(load_cluster("h100x8"), hosts=hosts)
    sizes = f"params.batch={batch}", f"params.minibatch={MINIBATCH}"
    graph = hflow.load("algorithms/grpo.yaml", [MODEL, *DTYPES, *sizes])
    return hflow.compile(graph, cluster, pins)


def staged(pp: int) -> bool:
    """Whether each stage has layers: those between the first and the last as few as suffice."""
    return LAYERS % pp == 0 or LAYERS - (pp - 2) * ceil(LAYERS / pp) >= 2


def divides(node: str, batch: int, pp: int, dp: int, tp: int) -> bool:
    """Whether Qwen2.5-7B can be split so, and GRPO's rows: a prompt's eight stay together, but that several
    replicas may generate equally many of them."""
    if HEADS % tp or KV_HEADS % tp or not staged(pp) or dp > HELD_OUT:
        return False
    if node == "rollout":
        return pp == 1 and (batch % dp == 0 or (dp % batch == 0 and GROUP % (dp // batch) == 0))
    return batch * GROUP % dp == 0 and (node != "actor_train" or MINIBATCH % dp == 0)


def wider(plan: Plan, batch: int) -> Iterator[tuple[str, int]]:
    """The nodes that could have more devices, and how many."""
    for own in (node for node in plan.nodes if node.model):
        for count in range(len(own.mesh.devices) + 1, plan.cluster.num_devices + 1):
            sizes = product(range(1, count + 1), (1, 2, 4, 8))
            found = ((pp, tp) for pp, tp in sizes if count % (pp * tp) == 0)
            whole = (count <= 8 and 8 % count == 0) or count % 8 == 0
            if whole and any(divides(own.node, batch, pp, count // (pp * tp), tp) for pp, tp in found):
                yield own.node, count


@pytest.mark.parametrize(
    ("hosts", "batch"), [*product((2, 3, 5, 6, 9), (64, 96, 128, 160)), (29, 128), (29, 160)]
)
def test_it_is_told_where_no_layout_divides(hosts: int, batch: int) -> None:
    plan = compiled(hosts, batch)
    unused, told = set(plan.cluster.devices) - set(plan.devices), undivided(plan)
    if unused:
        assert bool(told) == (not list(wider(plan, batch))), told
    if unused and told:
        name, count, dp, whole = re.findall(r"(\w+) on (\d+): dp(\d+) does not divide (\d+) ", told)[0]
        assert int(count) == 8 * hosts and int(count) % int(dp) == 0 and int(whole) % int(dp)
        assert not any(
            divides(name, batch, pp, 8 * hosts // (pp * tp), tp)
            for pp, tp in product(range(1, LAYERS + 1), (1, 2, 4))
            if 8 * hosts % (pp * tp) == 0
        )


def with_layers(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    monkeypatch.setitem(NAMED_SHAPES, name, replace(NAMED_SHAPES[name], num_layers=count))


def test_both_are_among_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers make no three stages, and 3 divides no rows; a pin alone leaves 8 of 16 without work."""
    with_layers(monkeypatch, "qwen2.5-7b", 2)
    told = ("note", "device 16-23 has nothing to do, since no node has a layout on more devices (rollout on"
            " 24: dp6 does not divide 128 prompts, nor the 8 samples of each)")  # fmt: skip
    assert told in remarks(compiled(3, 128, "ref_logprobs=@0-15"))
    pinned = compiled(2, 128, "rollout=@0-7", "ref_logprobs=@0-7", "actor_train=@0-7")
    assert undivided(pinned) == ""
    assert ("note", "device 8-15 has nothing to do") in remarks(pinned)


def test_pipelines_and_servers_are_counted_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 layers make no 17 stages, and 17 is a factor of no other number of Llama 2 of 70B."""
    with_layers(monkeypatch, "llama-70b", 16)
    cluster = replace(load_cluster("h100x128"), hosts=17)
    sets = ["params.model=shape:llama-70b", *DTYPES, "params.batch=256"]
    plan = hflow.compile(hflow.load(Path("algorithms/grpo.yaml"), sets), cluster)
    told = "rollout on 136: dp17 does not divide 256 prompts, nor the 8 samples of each"
    assert len(plan.devices) == 128 and undivided(plan) == told
