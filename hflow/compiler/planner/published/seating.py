"""Options on devices, priced as a complete plan: for planners that decide by other means than the search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hflow.compiler.candidates.meshes import options_of
from hflow.compiler.candidates.node_groups import Option, Options, Unit
from hflow.compiler.pins import Pin
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.indivisible import indivisible
from hflow.compiler.planner.search import Found
from hflow.compiler.planner.seats import Seat
from hflow.compiler.state import Draft
from hflow.diagnostics import Diagnostic, HflowError
from hflow.schedule.tasks import device_classes

Placed = Mapping[str, tuple[Option, int]]  # by unit: its option, and the first of its devices


def seated(placed: Placed) -> dict[str, Seat]:
    """The seats, with the sets of devices that units compete for."""
    devices = {name: tuple(range(first, first + o.num_devices)) for name, (o, first) in placed.items()}
    groups = list(dict.fromkeys(devices.values()))
    classes = list(device_classes(groups).values())
    return {
        name: Seat(placed[name][0], own, tuple(i for i, c in enumerate(classes) if groups.index(own) in c))
        for name, own in devices.items()
    }


def options_with(draft: Draft, units: Iterable[Unit], **settings: Any) -> dict[str, Options]:
    """The options of `units` as if each were pinned to `settings` (of `Pin`)."""
    pins = tuple(Pin(u.nodes[0].name, (), None, "", **settings) for u in units)
    pinned = replace(draft, pins=pins)
    return {u.name: options_of(pinned, u) for u in units}


def refuse_wishes(draft: Draft, placements: bool = False) -> None:
    """Raises HF309 for pins, and unless `placements` can be kept for those, which a fixed planner ignores."""
    planner, asked = draft.options.planner, [f"--pin {pin.text}" for pin in draft.pins]
    if draft.options.placement != "auto" and not placements:
        asked.append(f"--placement {draft.options.placement}")
    if asked:
        message = f"planner `{planner}` cannot keep {' '.join(asked)}"
        raise HflowError(Diagnostic("HF309", message, help="leave it out, or use the planner `exact`"))


def unproven(best: Incumbent, explored: int) -> Found:
    """What a planner that proves nothing has found. Raises HF305 where no plan of its kind fits, HF309 where
    there is none."""
    if best.choice:
        return Found(best.choice, 0.0, explored)
    draft, undivided = best.space.draft, indivisible(best.space)
    if undivided:
        raise HflowError(undivided)
    message = f"no plan of the planner `{draft.options.planner}` fits on `{draft.cluster.name}`"
    raise HflowError(Diagnostic("HF305", message, help="use more devices, or the planner `exact`"))
