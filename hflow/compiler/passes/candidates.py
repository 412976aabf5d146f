"""For every unit of nodes: on which numbers of devices, in which layouts, and how it can run there.

A layout is kept if all its sizes divide (heads, layers, vocabulary, rows) and some way to run fits into a
device's memory. Of the ways of one node in one layout (micro-batch, recomputation) those are kept that no
other beats in both time and memory; layouts are all kept, because what moves between nodes depends on them.
Nodes without a model have no candidates: they run where their values lie (`place`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hflow.compiler.candidates.meshes import meshes, needed_bytes, of_text, options_of, pins_of, refusal
from hflow.compiler.candidates.node_groups import Options, Unit, units
from hflow.compiler.explain.infeasible import misfit
from hflow.compiler.state import Draft
from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.layout import Mesh

MOST = 6  # layouts whose refusal is told


def candidates(draft: Draft) -> Draft:
    """Raises HF304 (or HF302 for pinned nodes) with the reasons why no layout of a unit is possible, HF305
    where only memory is in the way."""
    found: dict[str, Options] = {}
    errors: list[Diagnostic] = []
    for unit in units(draft.graph, draft.engines):
        found[unit.name] = options_of(draft, unit)
        if not found[unit.name] and not _is_too_large(draft, unit):
            errors.append(_nothing_fits(draft, unit))
    if not found:
        message = f"no node of `{draft.graph.name}` uses a model, so there is nothing to place"
        errors.append(Diagnostic("HF304", message, help="add a generate, score or train node"))
    if errors:
        raise HflowError(errors)
    if not all(found.values()):
        raise HflowError(misfit(draft))
    return replace(draft, candidates=found)


def _is_too_large(draft: Draft, unit: Unit) -> bool:
    """Whether an unpinned unit, which has no options, would have some if devices had more memory."""
    return not pins_of(draft, unit) and any(not refusal(draft, unit, m) for m in meshes(draft, unit))


def _nothing_fits(draft: Draft, unit: Unit) -> Diagnostic:
    pins = pins_of(draft, unit)
    reasons = ";\n".join(_reasons(draft, unit))
    names = " and ".join(f"`{n.name}`" for n in unit.nodes)
    together = "on one mesh, which they share since they use one model" if len(unit.nodes) > 1 else "so"
    if not pins:
        message, span = f"no layout of {names} is feasible", next(n.span for n in unit.nodes)
        return Diagnostic("HF304", message, span, reasons)
    message = " ".join(f"--pin {p.text}" for p in pins) + f": {names} cannot run {together}"
    unequal = "the pins disagree" if len(pins) > 1 else "its sizes do not multiply to its number of devices"
    return Diagnostic("HF302", message, help=reasons or unequal)


def _reasons(draft: Draft, unit: Unit) -> Iterator[str]:
    """Why it is none of the layouts on the most devices; those with one reason together."""
    of: dict[str, list[Mesh]] = {}
    for mesh in tuple(meshes(draft, unit))[-MOST:]:
        of.setdefault(_reason(draft, unit, mesh), []).append(mesh)
    return (f"{', '.join(map(str, alike))}: {reason}" for reason, alike in of.items())


def _reason(draft: Draft, unit: Unit, mesh: Mesh) -> str:
    if reason := refusal(draft, unit, mesh):
        return reason
    return f"needs {of_text(needed_bytes(draft, unit, mesh), draft.cluster.device.usable_bytes)}"
