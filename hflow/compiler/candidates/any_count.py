"""The candidates of a node group on other numbers of devices than whole hosts, or divisors of one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import gcd, prod

from hflow.compiler.candidates.meshes import candidates_of, pins_of, sizes
from hflow.compiler.candidates.node_groups import Candidate, Candidates, NodeGroup
from hflow.compiler.candidates.row_splits import context_sizes
from hflow.compiler.pins import Pin
from hflow.compiler.state import Draft


def candidates_on_hosts(draft: Draft, group: NodeGroup) -> Candidates:
    """Those on divisors of a host's devices and on whole hosts. Where such a number admits none, there are
    those on the most devices below it: 80 rows cannot be divided over 24 devices, but over 20."""
    found = dict(candidates_of(draft, group))
    if any(pin.devices for pin in pins_of(draft, group)):
        return found
    counts = _divisible_counts(draft, group)
    for fewer, more in pairwise(sizes(draft.cluster)):
        between = () if more in found else (n for n in counts if fewer < n < more)
        for count in between:
            if own := candidates_of(draft, group, (count,)):
                found |= own
                break
    return dict(sorted(found.items()))


def candidates_on_any_count(draft: Draft, group: NodeGroup) -> tuple[Candidate, ...]:
    """Those of `draft` and on all further numbers of devices, the fastest first. No pin gives the node group
    devices."""
    found = [candidate for candidates in draft.candidates[group.name].values() for candidate in candidates]
    for count in reversed(_divisible_counts(draft, group)):
        if count in draft.candidates[group.name]:
            continue
        pin = Pin(group.nodes[0].name, (), tuple(range(count)), "")
        pinned = replace(draft, pins=(*draft.pins, pin))
        found += [
            candidate for candidates in candidates_of(pinned, group).values() for candidate in candidates
        ]
    return tuple(sorted(found, key=lambda candidate: candidate.least_s))


def _divisible_counts(draft: Draft, group: NodeGroup) -> list[int]:
    """The numbers of devices, descending, that layers, heads, rows and their tokens may be divided over, but
    for those that are tried anyway."""
    shape, most = draft.shapes[group.model], draft.cluster.num_devices
    rows = gcd(*(gcd(work.rows, work.rows_per_update) for work in group.works))
    kv_heads = shape.num_kv_heads
    tps = [tp for tp in _divisors(shape.num_heads, most) if kv_heads % tp == 0 or tp % kv_heads == 0]
    parts = _divisors(shape.num_layers, most), tps, _divisors(rows, most)
    pins = pins_of(draft, group)
    contexts = {cp for count in range(1, most + 1) for cp in context_sizes(group, pins, count)}
    counts = set(map(prod, product(*parts, contexts)))
    return sorted((n for n in counts - {*sizes(draft.cluster)} if n <= most), reverse=True)


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]
