"""Every model on devices of its own, and generation on yet others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hflow.compiler.candidates.node_groups import Option, Options, Unit
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.published.seating import Placed
from hflow.compiler.planner.published.stages import StageTimes, in_turn, stage_sum_s, stage_times
from hflow.compiler.planner.space import Space


@dataclass(frozen=True)
class Group:
    """Units on devices of their own: their options, and what they take in each stage."""

    options: Mapping[str, Option]
    times: StageTimes


Groups = Mapping[int, Group]  # of the same units, by number of devices


def best_split(
    space: Space, models: Mapping[str, Options], generating: Mapping[str, Options]
) -> Placed | None:
    """The split of the devices, in powers of two, with the least sum of stages; None where none fits.

    Args:
        models, generating: the options of units that do not, and that do, generate with a trained model.
    """
    groups = [*_of_models(space, models), *(_fastest(space, name, o) for name, o in generating.items())]
    sizes = [[n for n in group if n.bit_count() == 1] for group in groups]
    splits = [
        (stage_sum_s(g[n].times for g, n in zip(groups, counts)), counts)
        for counts in _splits(sizes, space.num_devices)
    ]
    if not splits:
        return None
    _, counts = min(splits)
    firsts = Allocation(tuple(() for _ in counts), counts).firsts
    chosen = zip(groups, counts, firsts)
    return {name: (option, first) for g, n, first in chosen for name, option in g[n].options.items()}


def _of_models(space: Space, options: Mapping[str, Options]) -> Iterator[Groups]:
    """What trains a model and scores with it stays together."""
    for model in space.models:
        units = [u for u in space.units if u.model == model and u.name in options]
        counts = sorted(set[int].intersection(*(set(options[u.name]) for u in units)))
        each = ((n, _group(space, [(u, options[u.name][n][0]) for u in units])) for n in counts)
        yield {n: group for n, group in each if group}


def _fastest(space: Space, name: str, options: Options) -> Groups:
    unit = next(u for u in space.units if u.name == name)
    found: dict[int, Group] = {}
    for n, each in options.items():
        groups = [group for option in each if (group := _group(space, [(unit, option)]))]
        if groups:
            found[n] = min(groups, key=lambda group: sum(group.times))
    return found


def _group(space: Space, members: Sequence[tuple[Unit, Option]]) -> Group | None:
    """None where the memory does not suffice."""
    kept = sum(o.idle_bytes + (o.copy_bytes if u.role == "generate" else 0) for u, o in members)
    room = space.draft.cluster.device.usable_bytes - kept
    times = [t for u, o in members if (t := stage_times(u, o, room, space.model.rounds))]
    return Group({u.name: o for u, o in members}, in_turn(times)) if len(times) == len(members) else None


def _splits(sizes: Sequence[Sequence[int]], total: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each group one of its `sizes`, `total` devices at most."""
    if not sizes:
        yield ()
        return
    for count in (n for n in sizes[0] if n <= total):
        yield from ((count, *rest) for rest in _splits(sizes[1:], total - count))
