"""For every node group: on which numbers of devices, in which layouts, and how it can run there.

A layout is kept if all its sizes divide (heads, layers, vocabulary, rows) and some configuration fits into a
device's memory. Of the configurations of one node in one layout (micro-batch, recomputation) those are kept
that no other beats in both time and memory; layouts are all kept, because what moves between nodes depends on
them. Nodes without a model have no candidates: they run where their values lie (`place`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hflow.compiler.candidates.any_count import candidates_on_hosts
from hflow.compiler.candidates.meshes import meshes, needed_bytes, of_text, pins_of, refusal
from hflow.compiler.candidates.node_groups import Candidates, NodeGroup, node_groups
from hflow.compiler.candidates.shared_bases import alike
from hflow.compiler.explain.infeasible import infeasible
from hflow.compiler.state import Draft
from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.layout import Mesh

MOST = 6  # layouts whose refusal is told


def candidates(draft: Draft) -> Draft:
    """Raises HF304 (or HF302 for pinned nodes) with the reasons why no layout of a node group is possible,
    HF305 where only memory is in the way."""
    found: dict[str, Candidates] = {}
    errors: list[Diagnostic] = []
    groups = node_groups(draft.graph, draft.engines, draft.evaluation_graph, draft.sharing)
    for group in groups:
        found[group.name] = candidates_on_hosts(draft, group)
        if not found[group.name] and not _is_too_large(draft, group):
            errors.append(_nothing_fits(draft, group))
    if not found:
        message = f"no node of `{draft.graph.name}` uses a model, so there is nothing to place"
        errors.append(Diagnostic("HF304", message, help="add a generate, score or train node"))
    if errors:
        raise HflowError(errors)
    found = alike(draft.graph, groups, found)
    if not all(found.values()):
        raise HflowError(infeasible(draft))
    return replace(draft, candidates=found)


def _is_too_large(draft: Draft, group: NodeGroup) -> bool:
    """Whether an unpinned node group, which has no candidates, would have some if devices had more memory."""
    return not pins_of(draft, group) and any(not refusal(draft, group, m) for m in meshes(draft, group))


def _nothing_fits(draft: Draft, group: NodeGroup) -> Diagnostic:
    pins = pins_of(draft, group)
    reasons = ";\n".join(_reasons(draft, group))
    names = " and ".join(f"`{n.name}`" for n in group.nodes)
    together = "on one mesh, which they share since they use one model" if len(group.nodes) > 1 else "so"
    if not pins:
        message, span = f"no layout of {names} is feasible", next(n.span for n in group.nodes)
        return Diagnostic("HF304", message, span, reasons)
    message = " ".join(f"--pin {p.text}" for p in pins) + f": {names} cannot run {together}"
    unequal = "the pins disagree" if len(pins) > 1 else "its sizes do not multiply to its number of devices"
    return Diagnostic("HF302", message, help=reasons or unequal)


def _reasons(draft: Draft, group: NodeGroup) -> Iterator[str]:
    """Why it is none of the layouts on the most devices; those with one reason together."""
    of: dict[str, list[Mesh]] = {}
    for mesh in tuple(meshes(draft, group))[-MOST:]:
        of.setdefault(_reason(draft, group, mesh), []).append(mesh)
    return (f"{', '.join(mesh.sizes_text for mesh in alike)}: {reason}" for reason, alike in of.items())


def _reason(draft: Draft, group: NodeGroup, mesh: Mesh) -> str:
    if reason := refusal(draft, group, mesh):
        return reason
    return f"needs {of_text(needed_bytes(draft, group, mesh), draft.cluster.device.usable_bytes)}"
