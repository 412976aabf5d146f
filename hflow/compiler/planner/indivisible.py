"""Why a placement admits no plan at all, whatever the memory."""

from __future__ import annotations

from hflow.compiler.candidates.shared_bases import sharing_models
from hflow.compiler.planner.search_space import SearchSpace
from hflow.diagnostics import Diagnostic


def indivisible(space: SearchSpace) -> Diagnostic | None:
    """HF309 where the models or the devices are too few for a placement."""
    draft = space.draft
    sets = len(next(space.partitions(), ()))  # those of fewest sets come first
    has = draft.cluster.num_devices
    if sets > has:
        message = (
            f"--placement {draft.options.placement} needs {sets} devices; `{draft.cluster.name}` has {has}"
        )
        return Diagnostic("HF309", message, help="leave it out")
    if sets or draft.options.placement == "auto":  # which asks for no sets: all models may be pinned
        return None
    if sharing := sharing_models(draft.graph):
        names = " and ".join(f"`{name}`" for name in sharing[0])
        message = f"--placement {draft.options.placement} puts {names} apart, which share a base"
        return Diagnostic("HF309", message, help="leave it out, or drop `base`: each then has its own")
    needed = "two models that are not pinned to devices" if draft.pins else "two models"
    has = f"only `{space.models[0]}`" if space.models else "none"
    message = f"--placement {draft.options.placement} needs {needed}, and `{draft.graph.name}` has {has}"
    return Diagnostic("HF309", message, help="leave it out")
