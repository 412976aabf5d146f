"""What weights that move take at least, whatever devices they lie on, against what they take on many."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.cost.comm import reached
from hflow.cost.least_weights import ANYWHERE, Receivers, apart, beyond, least_weights_s, within
from hflow.cost.redistribution import weights_s
from hflow.plan.cluster import Cluster, DeviceKind, HostGroup, Link
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import num_parameters
from hflow.plan.sharding import Sharding, spreads

KIND = DeviceKind("A100", "cuda", 312e12, 80 * 10**9, 2e12, 0.5, 0.0)
INTRA, INTER, HOST = Link(300e9, 1e-5), Link(25e9, 1e-5), Link(20e9, 1e-5)
LLAMA, MOE = NAMED_SHAPES["llama-7b"], NAMED_SHAPES["qwen3-30b-a3b"]


def a100s(hosts: int, per_host: int, more: tuple[HostGroup, ...] = ()) -> Cluster:
    return Cluster("test", KIND, hosts, per_host, INTRA, INTER, HOST, more=more)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    per_host = draw(st.sampled_from((1, 2, 4, 8)))
    more = draw(st.sampled_from(((), (HostGroup(KIND, 2, 2),))))
    return a100s(draw(st.integers(2, 32 // per_host)), per_host, more)


@st.composite
def shardings(draw: st.DrawFn, cluster: Cluster, most: int, rollout: bool) -> Sharding:
    """On `most` devices or fewer, as if they were the first."""
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= min(most, cluster.devices_per_host)]))
    pp = draw(st.sampled_from([n for n in (1, 2, 3, 4, 5) if n * tp <= most]))
    dp = draw(st.integers(1, min(8, most // (tp * pp))))
    mesh = Mesh.of(tuple(range(pp * dp * tp)), pp=pp, dp=dp, tp=tp)
    ways = [way for way in product((1, 2, 4, 8), (False, True)) if spreads(mesh, *way)]
    ep, whole = draw(st.sampled_from(ways))
    engine = draw(st.sampled_from(("megatron", "sglang"))) if rollout else "megatron"
    fully = not rollout and draw(st.booleans())
    return Sharding(mesh, ep, fully, engine, whole_experts=whole)


def moved(sharding: Sharding, first: int) -> Sharding:
    mesh = sharding.mesh
    devices = tuple(device + first for device in mesh.devices)
    return replace(sharding, mesh=Mesh.of(devices, pp=mesh.pp, dp=mesh.dp, tp=mesh.tp))


@settings(max_examples=300)
@given(st.data())
def test_no_weights_arrive_sooner(data: st.DataObject) -> None:
    """Two rows apart, in either order and with a gap; a reader on all devices; a trainer on all of them.
    Uneven stages, experts, ZeRO-3, servers, hosts of two sizes."""
    cluster, shape = data.draw(clusters()), data.draw(st.sampled_from((LLAMA, MOE)))
    total = cluster.num_devices
    source = data.draw(shardings(cluster, total - 1, rollout=False))
    senders = len(source.mesh.devices)
    target = data.draw(shardings(cluster, total - senders, rollout=True))
    count = len(target.mesh.devices)
    gap = data.draw(st.integers(0, total - senders - count))
    at = data.draw(st.integers(0, total - senders - count - gap))
    one_first = data.draw(st.booleans())
    first, second = (at, at + count + gap) if one_first else (at + senders + gap, at)

    def took_s(own: Sharding, other: Sharding) -> float:
        return weights_s(shape, "bf16", other, own, cluster)

    def least_s(receivers: Receivers, *sources: Sharding) -> float:
        return float(least_weights_s(shape, "bf16", sources, [target], [receivers], cluster)[0, 0])

    others = data.draw(st.integers(senders, total))
    real_s = took_s(moved(target, first), moved(source, second)) * (1 + 1e-9)
    assert least_s(apart(count, others, cluster)) <= real_s
    assert least_s(ANYWHERE, source) <= real_s
    inside = data.draw(st.integers(0, max(0, count - senders)))
    if count > senders:
        assert least_s(beyond(count, senders, cluster)) <= took_s(target, moved(source, inside)) * (1 + 1e-9)
    if senders > count:
        place = data.draw(st.integers(0, senders - count))
        assert least_s(within(count, cluster), source) <= took_s(moved(target, place), source) * (1 + 1e-9)


def test_rows_of_whole_hosts_take_no_longer_than_that() -> None:
    """Two hosts with tp 8 to 14 of them: each of the 13 that cannot be shared receives all, from two hosts,
    or three where the row begins within one; and every device its eighth."""
    cluster, size = a100s(16, 8), num_parameters(LLAMA) * 2
    source, target = (Sharding(Mesh.of(tuple(range(n)), dp=n // 8, tp=8)) for n in (16, 112))
    [[least_s]] = least_weights_s(LLAMA, "bf16", [], [target], [apart(112, 16, cluster)], cluster)
    nics, link = reached(cluster, INTER), reached(cluster, INTRA)
    devices_s = size / 8 / link.bandwidth + link.latency_s
    assert least_s == pytest.approx(devices_s + 13 / 3 * size / nics.bandwidth + nics.latency_s)
    real_s = weights_s(LLAMA, "bf16", source, moved(target, 16), cluster)
    assert real_s == pytest.approx(devices_s + 14 / 2 * size / nics.bandwidth + nics.latency_s)


def test_a_trainer_on_all_devices_has_a_part_of_what_each_host_needs() -> None:
    """ZeRO-3 over 64 devices leaves an eighth of the model on a host; a rollout needs all of it there."""
    cluster, size = a100s(8, 8), num_parameters(LLAMA) * 2
    source = Sharding(Mesh.of(tuple(range(64)), dp=64), fully=True)
    target = Sharding(Mesh.of(tuple(range(16)), dp=2, tp=8))
    [[least_s]] = least_weights_s(LLAMA, "bf16", [source], [target], [within(16, cluster)], cluster)
    nics, link = reached(cluster, INTER), reached(cluster, INTRA)
    into_devices_s = (1 / 8 - 1 / 64) * size / link.bandwidth + link.latency_s
    assert least_s == pytest.approx(into_devices_s + (1 - 1 / 8) * size / nics.bandwidth + nics.latency_s)
