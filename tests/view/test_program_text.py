from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hflow.graph.types import parse_type
from hflow.plan.layout import Mesh, Only, Replicate
from hflow.plan.program import Carry, Free, Recall, Release, SyncWeights, Transfer
from hflow.view.terminal.program_text import placed, program_text
from tests.layouts import rows_layout
from tests.view.examples import LOGPROBS, OFFLOAD_PLAN, PLAN
from tests.view.examples_in_time import NUM_ROUNDS, ROUNDS_PLAN


def test_program_text_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden("view/program.txt", program_text(PLAN.step, PLAN.nodes))


def test_program_with_rounds_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    text = program_text(ROUNDS_PLAN.step, ROUNDS_PLAN.nodes)
    assert f"at least {NUM_ROUNDS} rounds" in text
    golden("view/program-rounds.txt", text)


def test_every_instruction_has_its_line_in_order() -> None:
    text = program_text(OFFLOAD_PLAN.step, OFFLOAD_PLAN.nodes)
    lines = [line for line in text.splitlines()[1:] if not line.lstrip().startswith(("mesh", ":"))]
    instructions = OFFLOAD_PLAN.step.instructions
    assert len(lines) == len(instructions)
    for line, i in zip(lines, instructions):
        moves = isinstance(i, Transfer | SyncWeights)
        assert (OFFLOAD_PLAN.step.edges[i.edge].collective if moves else i.node) in line
    assert "  onload actor_train  2.0 s" in lines and "  offload actor_train  2.0 s" in lines


def test_what_only_keeps_or_drops_has_no_time() -> None:
    kept = (
        Recall("advantages", (0,), {"w": "advantages.w@-1:0"}, lag=1, init=0.0),
        Carry("advantages", (0,), {"w": "advantages.w"}, lag=1),
        Release("rollout", (0,)),
        Free("rollout", (0,), ("rollout.a", "rollout.b")),
    )
    text = program_text(replace(PLAN.step, instructions=kept), PLAN.nodes)
    assert text.splitlines()[-4:] == [
        "  %advantages.w@-1:0 = recall advantages lag 1",
        "  carry advantages %advantages.w lag 1",
        "  release rollout",
        "  free %rollout.a, %rollout.b",
    ]


def test_types_show_which_axes_split_their_rows() -> None:
    mesh = Mesh.of((0, 1, 2, 3), dp=2, tp=2)
    rows = "f32[batch*group{dp}, resp~]<actor@k behaviour>"
    assert placed(LOGPROBS, rows_layout(mesh)) == rows
    last_stage = replace(rows_layout(mesh), placements=(Only(0), *rows_layout(mesh).placements[1:]))
    assert placed(LOGPROBS, last_stage) == rows
    whole = replace(rows_layout(mesh), placements=(Replicate(),) * 3)
    assert placed(LOGPROBS, whole) == str(LOGPROBS)
    assert placed(parse_type("f32[]"), whole) == "f32[]"
