"""A program's instructions as tasks for `list_scheduling`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hflow.plan.program import Instruction, Timeless
from hflow.schedule.list_scheduling import Task


def device_classes(groups: Iterable[Sequence[int]]) -> dict[tuple[int, ...], frozenset[int]]:
    """Devices that are in exactly the same of `groups`, ascending, with the numbers of these groups (in the
    order in which different ones first occur); classes in the order of their first devices."""
    member_of: dict[int, list[int]] = {}
    for number, group in enumerate(dict.fromkeys(map(tuple, groups))):
        for device in group:
            member_of.setdefault(device, []).append(number)
    classes: dict[tuple[int, ...], list[int]] = {}
    for device in sorted(member_of):
        classes.setdefault(tuple(member_of[device]), []).append(device)
    return {tuple(devices): frozenset(numbers) for numbers, devices in classes.items()}


def resources(instructions: Sequence[Instruction]) -> list[tuple[int, ...]]:
    """The classes of devices, by number, that each instruction runs on."""
    groups = list(dict.fromkeys(i.devices for i in instructions))
    classes: list[list[int]] = [[] for _ in groups]
    for number, member_of in enumerate(device_classes(groups).values()):
        for group in member_of:
            classes[group].append(number)
    of = {group: tuple(numbers) for group, numbers in zip(groups, classes)}
    return [of[i.devices] for i in instructions]


def tasks(instructions: Sequence[Instruction]) -> list[Task]:
    """One task per instruction. What only keeps or drops takes no time and makes no device wait for another,
    so it has no resources."""
    return [
        Task(0.0, (), i.after) if isinstance(i, Timeless) else Task(i.time_s, on, i.after)
        for i, on in zip(instructions, resources(instructions))
    ]
