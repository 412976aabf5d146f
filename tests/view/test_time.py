"""Tables and time lines of plans with rounds, and with weights and values of earlier steps."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest

from hflow.plan.program import Call, Transfer
from hflow.report.trace import chrome_trace
from hflow.schedule.critical_path import idle
from hflow.schedule.timed_span import step_time_s
from hflow.view.picture.gantt import plan_gantt
from hflow.view.picture.svg import plan_svg
from hflow.view.terminal.plan_json import plan_json
from hflow.view.terminal.remarks import idle_fraction, path_names
from hflow.view.terminal.terminal import plan_text
from hflow.view.timeline import steady_tracks, steps_tracks
from tests.view.examples import PLAN
from tests.view.examples_in_time import LATE_PLAN, NUM_ROUNDS, ROUNDS_GRAPH, ROUNDS_PLAN, ROWS

IN_ROUNDS = {"prompts", "rollout", "reward"}
SVG = "{http://www.w3.org/2000/svg}"


def test_every_round_has_its_bars_and_none_overlap() -> None:
    tracks = steps_tracks(ROUNDS_PLAN.step)
    assert [t.devices for t in tracks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    for track in tracks:
        assert all(first.end_s <= second.start_s for first, second in pairwise(track.bars))
        assert [b.name for b in track.bars if b.name == "rollout"] == ["rollout"] * NUM_ROUNDS
    rollouts = [(b.start_s, b.end_s) for b in tracks[0].bars if b.name == "rollout"]
    assert rollouts == [(1.0, 5.0), (9.0, 13.0), (17.0, 21.0)], "a round takes 8 s, 4 of them the rollout"


def test_bars_take_the_time_of_their_nodes() -> None:
    for node in ROUNDS_PLAN.nodes:
        taken = sum(
            b.seconds * len(t.devices)
            for t in steps_tracks(ROUNDS_PLAN.step)
            for b in t.bars
            if b.name == node.node
        )
        assert taken == node.time_s * len(node.mesh.devices)
    busy = sum(n.time_s * len(n.mesh.devices) for n in ROUNDS_PLAN.nodes)
    assert idle_fraction(ROUNDS_PLAN) == pytest.approx(1 - busy / (8 * 37.0))


def test_the_critical_path_goes_through_the_rounds() -> None:
    assert path_names(ROUNDS_PLAN) == (
        "prompts", "rollout", "reward", "sampling", "ref_logprobs", "actor_train",
    )  # fmt: skip


def test_steps_that_overlap_fill_one_period() -> None:
    """Sampling on 4-7 (8 s) one step ahead of training on 0-3 (10 s): a period is 10 s, and shows both."""
    left, right = tuple(range(4)), tuple(range(4, 8))
    both = left + right
    instructions = (
        Transfer("actor_train", both, 0, {}, {}, time_s=1.0),
        Call("rollout", right, time_s=8.0, after=(0,)),
        Call("actor_train", left, time_s=10.0, after=(0,)),
    )
    program = replace(PLAN.step, instructions=instructions)
    plan = replace(PLAN, step=program, step_time_s=step_time_s(program))
    assert plan.step_time_s == 11.0
    for steps in (1, 3):
        tracks = {t.devices: t.bars for t in steady_tracks(plan, steps)}
        assert sum(b.seconds for b in tracks[left]) == pytest.approx(11.0 * steps)
        assert sum(b.seconds for b in tracks[right]) == pytest.approx(9.0 * steps)
        assert all(0 <= b.start_s < b.end_s <= 11.0 * steps for bars in tracks.values() for b in bars)
    assert [share for _, share in sorted(idle(program).items())] == pytest.approx([0.0, 2 / 11])


def test_the_table_marks_rounds_and_says_their_rule() -> None:
    lines = plan_text(ROUNDS_PLAN).splitlines()
    rule = f"rounds   ↻ sampling: until {ROWS} rows kept, ≤ 16 rounds; times are those of {NUM_ROUNDS} rounds"
    assert rule in lines
    marked = {line.split("↻")[1].split()[0] for line in lines if "↻" in line} - {"sampling:"}
    assert marked == IN_ROUNDS
    assert plan_text(ROUNDS_PLAN, ascii_only=True).isascii()
    assert "↻" not in plan_text(PLAN) and "rounds" not in plan_text(PLAN)


def test_the_table_tells_the_age_of_weights_and_what_is_carried() -> None:
    text = plan_text(LATE_PLAN, width=140)
    by_name = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "weights, 1 update old" in by_name["actor => rollout"]
    assert "weights, every 50 steps" in by_name["actor => ref_logprobs"]
    assert "carried  advantages.weight -> advantages, lag 1, init 0.5" in text.splitlines()
    assert "carried" not in plan_text(PLAN)


def test_json_says_the_same() -> None:
    late, rounds = plan_json(LATE_PLAN, 0.0), plan_json(ROUNDS_PLAN, 0.0)
    json.dumps([late, rounds])
    ages = {e["name"]: (e["lag"], e["every"]) for e in late["edges"] if e["kind"] == "weights"}
    assert ages == {"actor => rollout": (1, 0), "actor => ref_logprobs": (0, 50)}
    assert late["carried"] == [{"source": "advantages.weight", "target": "advantages", "lag": 1, "init": 0.5}]
    (region,) = rounds["regions"]
    assert region == {
        "name": "sampling", "until": "reward.keep", "rows": ROWS, "rounds": NUM_ROUNDS, "most_rounds": 16,
        "short": "fill", "max_age": 0,
    }  # fmt: skip
    assert {n["name"] for n in rounds["nodes"] if n["region"] == "sampling"} == IN_ROUNDS


def test_pictures_show_every_round() -> None:
    titles = [t.text or "" for t in ET.fromstring(plan_gantt(ROUNDS_PLAN)).iter(f"{SVG}title")]
    tracks = 2  # devices 0-3 and 4-7 do different things
    assert sum(t.startswith("rollout (call)") for t in titles) == NUM_ROUNDS * tracks
    texts = {t.text for t in ET.fromstring(plan_svg(ROUNDS_PLAN)).iter(f"{SVG}text")}
    assert {n.name for n in ROUNDS_GRAPH.nodes} <= texts and "12.0 s" in texts


def test_the_trace_keeps_rounds_apart() -> None:
    events = [e for e in json.loads(chrome_trace(ROUNDS_PLAN))["traceEvents"] if e["ph"] == "X"]
    events = [e for e in events if e["args"]["step"] == 0]
    starts = sorted(e["ts"] / 1e6 for e in events if e["name"] == "rollout" and e["tid"] == 0)
    assert starts == [1.0, 9.0, 17.0]
