"""Plans that keep less in the memory of hosts, where a cluster file says what these have.

The search counts the memory of devices. Where what waits in a host's memory then exceeds that, less has to
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from hflow.compiler.pins import Pin
from hflow.compiler.state import Draft
from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.plan import Plan


class HostTooFull(HflowError):  # noqa: N818  (it is what was found of a plan)
    """HF305: a host has too little memory. `waiting`: the nodes whose models wait there."""

    def __init__(self, diagnostic: Diagnostic, waiting: tuple[str, ...] = ()):
        super().__init__(diagnostic)
        self.waiting = waiting


def planned_in_hosts(draft: Draft, planned: Callable[[Draft], Plan]) -> Plan:
    """The plan of `draft`. Where it keeps too much on a host, the one with the shortest step of those in
    which one node fewer waits there; where none of these fits, the one in which no node does.

    Raises:
        HflowError: what `planned` raises. HostTooFull when none of them fits.
    """
    try:
        return planned(draft)
    except HostTooFull as found:
        full = found
    asked = {pin.node for pin in draft.pins if pin.offload}
    waiting = [name for name in full.waiting if name not in asked]
    fitting = [*_fitting((_staying(draft, [name]) for name in waiting), planned)]
    if not fitting and len(waiting) > 1:
        fitting = [*_fitting([_staying(draft, waiting)], planned)]
    if not fitting:
        raise _without_way_out(full, waiting) from None
    return min(fitting, key=lambda plan: plan.step_time_s)


def _without_way_out(full: HostTooFull, tried: Sequence[str]) -> HostTooFull:
    """Says what has been tried, and what a pin asks for."""
    (found,) = full.diagnostics
    asked = [name for name in full.waiting if name not in tried]
    said = [f"nor does a plan fit without offload of {_listed(tried)}"] if tried else []
    said += [f"a pin asks for offload of {_listed(asked)}"] if asked else []
    return HostTooFull(replace(found, help="; ".join([found.help, *said])), full.waiting)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _fitting(drafts: Iterable[Draft], planned: Callable[[Draft], Plan]) -> Iterator[Plan]:
    for draft in drafts:
        try:
            yield planned(draft)
        except HflowError:
            continue


def _staying(draft: Draft, names: list[str]) -> Draft:
    """With these nodes kept on their devices, as ``NODE=no-offload`` says."""
    own = {pin.node: pin for pin in draft.pins}
    pins = {name: own.get(name) or Pin(name, (), None, f"{name}=no-offload") for name in names}
    return replace(
        draft, pins=(*(own | {n: replace(pin, offload=False) for n, pin in pins.items()}).values(),)
    )
