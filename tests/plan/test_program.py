"""Instructions of all kinds: as JSON, and the handles that they read and write."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from hflow.plan.program import (
    Activity,
    Await,
    Call,
    Carry,
    Free,
    Instruction,
    Loop,
    Offload,
    Onload,
    Recall,
    Release,
    SyncWeights,
    Timed,
    Timeless,
    Transfer,
    handles_read,
    handles_written,
    with_bodies,
)

ONE = (0,)
CALL = Call("rollout", ONE, {"prompts": "p"}, {"tokens": "t"}, after=(0, 2), time_s=1.5)
LOOP = Loop("sampling", ONE, (CALL, Call("sampling", ONE, {"tokens": "t"})), {"tokens": "all"}, time_s=3.0)
ALL: tuple[Instruction, ...] = (
    CALL,
    Await("rollout", ONE, {"tokens": "t"}),
    Transfer("train", (0, 1), 3, {"tokens": "t"}, {"tokens": "t@train"}, time_s=0.1),
    SyncWeights("rollout", (0, 1), 4, every=2, donates=True, time_s=0.2),
    LOOP,
    Onload("train", ONE, time_s=0.3),
    Offload("train", ONE, time_s=0.3),
    Release("rollout", ONE, donates=True),
    Carry("penalty", ONE, {"weight": "w"}, 1),
    Recall("penalty", ONE, {"weight": "w@-1"}, 1, 0.5),
    Free("train", ONE, ("t", "p")),
)
JSON = TypeAdapter[Any](tuple[Instruction, ...])
HANDLES = {  # read, written
    "call": (("p",), ("t",)),
    "await": ((), ("t",)),
    "transfer": (("t",), ("t@train",)),
    "loop": ((), ("all",)),
    "carry": (("w",), ()),
    "recall": ((), ("w@-1",)),
    "free": (("t", "p"), ()),
}


def test_these_are_all() -> None:
    union, _ = get_args(Instruction)
    assert set(map(type, ALL)) == set(get_args(union)) == {*get_args(Timed), *get_args(Timeless)}
    assert set(get_args(Timed)) - set(get_args(Activity)) == {Loop}


def test_json_round_trip() -> None:
    assert JSON.validate_json(JSON.dump_json(ALL)) == ALL


@pytest.mark.parametrize("instruction", ALL, ids=lambda i: i.op)
def test_json_names_the_instruction_first(instruction: Instruction) -> None:
    (entry,) = JSON.dump_python((instruction,), mode="json")
    assert list(entry)[:4] == ["op", "node", "devices", "after"]
    assert set(entry) == {f.name for f in fields(instruction)}
    assert ("time_s" in entry) == isinstance(instruction, Timed)


@pytest.mark.parametrize("instruction", ALL, ids=lambda i: i.op)
def test_json_with_a_key_of_another_instruction_is_refused(instruction: Instruction) -> None:
    (entry,) = JSON.dump_python((instruction,), mode="json")
    foreign = next(name for name in ("every", "handles") if name not in entry)
    with pytest.raises(ValidationError, match="Unexpected keyword argument"):
        JSON.validate_python([{**entry, foreign: 0}])
    with pytest.raises(ValidationError, match="op"):
        JSON.validate_python([{name: value for name, value in entry.items() if name != "op"}])


@pytest.mark.parametrize("instruction", ALL, ids=lambda i: i.op)
def test_handles(instruction: Instruction) -> None:
    found = handles_read(instruction), handles_written(instruction)
    assert found == HANDLES.get(instruction.op, ((), ()))


def test_bodies_follow_their_loops() -> None:
    assert list(with_bodies([CALL, LOOP])) == [CALL, LOOP, *LOOP.body]
