"""The candidates of a node group on all numbers of devices that a pin may give it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import gcd, prod

from hflow.compiler.candidates.meshes import candidates_of, pins_of, sizes
from hflow.compiler.candidates.node_groups import Candidate, NodeGroup
from hflow.compiler.candidates.row_splits import context_sizes
from hflow.compiler.pins import Pin
from hflow.compiler.state import Draft


def candidates_on_any_count(draft: Draft, group: NodeGroup) -> tuple[Candidate, ...]:
    """Those of `draft` and on further numbers of devices, the fastest first. No pin gives the node group
    devices."""
    found = [candidate for candidates in draft.candidates[group.name].values() for candidate in candidates]
    for count in _other_counts(draft, group):
        pin = Pin(group.nodes[0].name, (), tuple(range(count)), "")
        pinned = replace(draft, pins=(*draft.pins, pin))
        found += [
            candidate for candidates in candidates_of(pinned, group).values() for candidate in candidates
        ]
    return tuple(sorted(found, key=lambda candidate: candidate.least_s))


def _other_counts(draft: Draft, group: NodeGroup) -> Iterator[int]:
    """Numbers of devices that are no candidates, but that layers, heads, rows and their tokens may be divided
    over."""
    shape, most = draft.shapes[group.model], draft.cluster.num_devices
    rows = gcd(*(gcd(work.rows, work.rows_per_update) for work in group.works))
    kv_heads = shape.num_kv_heads
    tps = [tp for tp in _divisors(shape.num_heads, most) if kv_heads % tp == 0 or tp % kv_heads == 0]
    parts = _divisors(shape.num_layers, most), tps, _divisors(rows, most)
    pins = pins_of(draft, group)
    contexts = {cp for count in range(1, most + 1) for cp in context_sizes(group, pins, count)}
    counts = set(map(prod, product(*parts, contexts)))
    known = {*sizes(draft.cluster), *draft.candidates[group.name]}
    yield from sorted(count for count in counts - known if count <= most)


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]
