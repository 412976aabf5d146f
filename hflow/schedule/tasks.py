"""A program's instructions as tasks that compete for devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hflow.plan.program import Instruction, Timeless
from hflow.schedule.task_times import Task


def device_classes(groups: Iterable[Sequence[int]]) -> dict[tuple[int, ...], frozenset[int]]:
    """Devices that are in exactly the same of `groups`, ascending, with the numbers of these groups (in the
    order in which different ones first occur); classes in the order of their first devices."""
    classes: list[tuple[set[int], tuple[int, ...]]] = []
    for number, group in enumerate(dict.fromkeys(map(tuple, groups))):
        classes = list(_parted(classes, set(group), number))
    in_order = sorted((sorted(devices), numbers) for devices, numbers in classes)
    return {tuple(devices): frozenset(numbers) for devices, numbers in in_order}


def _parted(
    classes: Iterable[tuple[set[int], tuple[int, ...]]], group: set[int], number: int
) -> Iterator[tuple[set[int], tuple[int, ...]]]:
    """The classes, each parted into those devices that are in another `group` and those that are not; and the
    devices of the group that no class has."""
    for devices, numbers in classes:
        inside = devices & group
        group -= inside
        outside = devices - inside if inside else devices
        if inside:
            yield inside, (*numbers, number)
        if outside:
            yield outside, numbers
    if group:
        yield group, (number,)


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
