"""Candidates on devices, priced as a complete plan: for planners that decide by other means than the
search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hflow.compiler.candidates.meshes import candidates_of
from hflow.compiler.candidates.node_groups import Candidate, Candidates, NodeGroup
from hflow.compiler.candidates.row_splits import uncut
from hflow.compiler.pins import Pin
from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.indivisible import indivisible
from hflow.compiler.planner.search import SearchResult
from hflow.compiler.state import Draft
from hflow.diagnostics import Diagnostic, HflowError
from hflow.schedule.tasks import device_classes

PlacedCandidates = Mapping[
    str, tuple[Candidate, int]
]  # by node group: its candidate, and the first of its devices


def as_assignments(placed: PlacedCandidates) -> dict[str, Assignment]:
    """The assignments, with the sets of devices that node groups compete for."""
    devices = {name: tuple(range(first, first + o.num_devices)) for name, (o, first) in placed.items()}
    sets = list(dict.fromkeys(devices.values()))
    classes = list(device_classes(sets).values())
    return {
        name: Assignment(
            placed[name][0], own, tuple(i for i, c in enumerate(classes) if sets.index(own) in c)
        )
        for name, own in devices.items()
    }


def candidates_with(draft: Draft, groups: Iterable[NodeGroup], **settings: Any) -> dict[str, Candidates]:
    """The candidates of `groups` as if each were pinned to `settings` (of `Pin`)."""
    pins = tuple(Pin(u.nodes[0].name, (), None, "", **settings) for u in groups)
    pinned = replace(draft, pins=pins)
    return {u.name: candidates_of(pinned, u) for u in groups}


def megatron_candidates(draft: Draft, groups: Iterable[NodeGroup]) -> dict[str, Candidates]:
    """As verl sets up Megatron: the optimizer of replicas is split over them, and where there is tensor
    parallelism, so are rows (`use_distributed_optimizer` and `sequence_parallel` in its Megatron workers)."""
    groups = tuple(groups)
    whole = candidates_with(draft, groups, sp=False, offload=False)
    cut = candidates_with(draft, [group for group in groups if not uncut(group)], sp=True, offload=False)
    return {g.name: _as_megatron(g, whole[g.name], cut.get(g.name, {})) for g in groups}


def _as_megatron(group: NodeGroup, whole: Candidates, cut: Candidates) -> Candidates:
    """Of candidates with whole rows those that have to."""
    found = {
        count: (*(c for c in whole.get(count, ()) if c.tp == 1 or not cut), *cut.get(count, ()))
        for count in sorted({*whole, *cut})
    }
    split = {n: tuple(c for c in each if _optimizer_is_split(group, c)) for n, each in found.items()}
    return {n: each for n, each in split.items() if each}


def _optimizer_is_split(group: NodeGroup, candidate: Candidate) -> bool:
    return group.role != "train" or candidate.dp * candidate.cp == 1 or candidate.strategy.zero == 1


def refuse_wishes(draft: Draft, placements: bool = False) -> None:
    """Raises HF309 for pins, for models that share a base, and unless `placements` can be kept for those,
    which a fixed planner ignores."""
    planner, asked = draft.options.planner, [f"--pin {pin.text}" for pin in draft.pins]
    asked += [f"`base: {model.base}` of `{model.name}`" for model in draft.graph.models if model.base]
    if draft.options.placement != "auto" and not placements:
        asked.append(f"--placement {draft.options.placement}")
    if asked:
        message = f"planner `{planner}` cannot keep {' '.join(asked)}"
        raise HflowError(Diagnostic("HF309", message, help="leave it out, or use the planner `exact`"))


def unproven(best: Incumbent, explored: int) -> SearchResult:
    """What a planner that proves nothing has found. Raises HF305 where no plan of its kind fits, HF309 where
    there is none."""
    if best.choice:
        return SearchResult(best.choice, 0.0, explored)
    draft, undivided = best.space.draft, indivisible(best.space)
    if undivided:
        raise HflowError(undivided)
    message = f"no plan of the planner `{draft.options.planner}` fits on `{draft.cluster.name}`"
    raise HflowError(Diagnostic("HF305", message, help="use more devices, or the planner `exact`"))
