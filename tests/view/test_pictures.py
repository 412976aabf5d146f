from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import nan

import pytest

from hflow.diagnostics import Diagnostic
from hflow.plan.layout import Mesh
from hflow.report.report import RunReport, report_html
from hflow.report.trace import chrome_trace
from hflow.view.measured import measured_times
from hflow.view.pages.notebook import graph_bundle, plan_bundle, run_bundle
from hflow.view.picture.chart import line_chart
from hflow.view.picture.gantt import plan_gantt, run_gantt
from hflow.view.picture.gantt_legend import gantt_legend
from hflow.view.picture.svg import graph_svg, plan_svg
from hflow.view.picture.ticks import ticks
from hflow.view.timeline import Bar, Track
from tests.view.examples import GRAPH, NODE_PLANS, OFFLOAD_PLAN, PLAN, SUMMARY, measured_events, metric_lines
from tests.view.pages import parse

SVG = "{http://www.w3.org/2000/svg}"


def titles(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}title")]


def test_graph_svg_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden("view/graph.svg", graph_svg(GRAPH))


def test_narrow_graph_svg_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden("view/graph_narrow.svg", graph_svg(GRAPH, narrow=True))


def test_plan_svg_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden("view/plan.svg", plan_svg(PLAN))


def test_gantt_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden("view/gantt.svg", plan_gantt(PLAN))


@pytest.mark.parametrize("narrow", [False, True])
def test_graph_svg_shows_every_node_and_every_edge_with_its_type(narrow: bool) -> None:
    svg = graph_svg(GRAPH, narrow)
    texts = {element.text for element in ET.fromstring(svg).iter(f"{SVG}text")}
    assert {n.name for n in GRAPH.nodes} <= texts
    shown = titles(svg)
    said = [line for title in shown for line in title.splitlines()]
    for node, value in GRAPH.edges():
        assert said.count(f"{value.source} -> {node.name}.{value.port}: {value.type}") == 1
    assert [t for t in shown if "=>" in t] == ["actor_train => rollout: actor weights, next step"]


def test_frozen_models_have_no_weight_edge() -> None:
    assert not any("ref_logprobs:" in t for t in titles(graph_svg(GRAPH)) if "=>" in t)


def test_plan_svg_tells_what_each_edge_was_lowered_to() -> None:
    shown = "\n".join(titles(plan_svg(PLAN)))
    assert "all_gather: dp2 tp2 @0-3 to dp8 @0-7, 15.2 GB, 0.19 s" in shown
    assert "p2p: dp8 @0-7 to dp4 @4-7" in shown


def test_text_from_users_is_escaped() -> None:
    first, *rest = GRAPH.nodes
    hostile = replace(first, options={"prompt": "<script>alert('x')</script>"})
    svg = graph_svg(replace(GRAPH, nodes=(hostile, *rest)))
    ET.fromstring(svg)
    assert "<script" not in svg


def test_gantt_bars_are_as_long_as_the_times() -> None:
    svg = ET.fromstring(plan_gantt(PLAN))
    bars = {g.find(f"{SVG}title"): g.find(f"{SVG}rect") for g in svg.iter(f"{SVG}g")}
    widths: dict[str, float] = {}
    for title, rect in bars.items():
        assert title is not None and title.text and rect is not None
        widths[title.text.partition(" (")[0]] = float(rect.attrib["width"])
    times = {n.node: n.time_s for n in NODE_PLANS}
    assert widths["rollout"] / widths["actor_train"] == pytest.approx(
        times["rollout"] / times["actor_train"], rel=1e-3
    )


@pytest.mark.parametrize("width", [300, 700, 3000])
def test_gantt_names_every_bar(width: int) -> None:
    """In it, by a number in it with the name beside the number below, or among what is too short to see."""
    svg = ET.fromstring(plan_gantt(PLAN, width))
    texts = ["".join(e.itertext()) for e in svg.iter(f"{SVG}text")]
    bars = [(g.findtext(f"{SVG}title", ""), g.findtext(f"{SVG}text", "")) for g in svg.iter(f"{SVG}g")]
    nodes = [(title.partition(" (")[0], label) for title, label in bars if "(call)" in title]
    assert len({name for name, _ in nodes}) == len(PLAN.nodes)
    for name, label in nodes:
        unseen = {name, f"{name},", f"too short to see: {name}", f"too short to see: {name},"}
        assert label == name or (f"{label} {name}" in texts if label else not unseen.isdisjoint(texts))


def test_a_bar_without_room_is_not_named_below_where_another_one_has_its_name() -> None:
    long, short = (Bar("train", "call", 0.0, end_s) for end_s in (9.0, 0.01))
    legend = gantt_legend([Track((0,), (long,)), Track((1,), (short,))], 10.0, 500.0)
    assert legend.names == () and legend.label(long, 90.0) == "train" and legend.label(short, 0.1) == ""


def test_measured_gantt_has_a_line_per_device() -> None:
    texts = {e.text for e in ET.fromstring(run_gantt(PLAN, measured_events(), 1)).iter(f"{SVG}text")}
    assert {f"device {d}" for d in range(8)} <= texts


@pytest.mark.parametrize("low", [0.0, -0.7, 0.31, 1234.5])
@pytest.mark.parametrize("span", [0.9, 1.0, 7.7, 27.52, 100, 86_400])
def test_ticks_are_round_few_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span, 8)
    assert low - 1e-9 <= found[0] and found[-1] <= low + span + 1e-9 and 3 <= len(found) <= 9
    step = found[1] - found[0]
    assert re.fullmatch(r"[125](\.0+)?e[+-]\d+", f"{step:.3e}")
    assert all(t / step == pytest.approx(round(t / step), abs=1e-6) for t in found)


def test_chart_leaves_a_gap_where_a_value_is_missing() -> None:
    svg = ET.fromstring(line_chart("loss", [0, 1, 2, 3, 4, 5], [3.0, 2.0, None, nan, 1.0, 0.5]))
    lines = [e.attrib["points"].split() for e in svg.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [2, 2]
    heights = [float(point.split(",")[1]) for line in lines for point in line]
    assert heights == sorted(heights), "smaller values are further down"


@pytest.mark.parametrize(
    ("low", "spread"),
    [(0, 3e-9), (0, 0.0012), (-2, 0.0025), (-2, 1), (0, 160), (13_612, 130), (13_612, 70_000), (4e9, 5e6)],
)
def test_labels_of_an_axis_stand_where_their_values_are(low: float, spread: float) -> None:
    svg = ET.fromstring(line_chart("metric", [0, 1], [low, low + spread]))
    (line,) = svg.iter(f"{SVG}polyline")
    bottom, top = (float(point.split(",")[1]) for point in line.attrib["points"].split())
    labels = [e for e in svg.iter(f"{SVG}text") if e.attrib["text-anchor"] == "end"]
    assert len(labels) >= 2
    for label in labels:
        number, _, unit = (label.text or "").partition(" ")
        value = float(number) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit]
        expected = bottom + (value - low) / spread * (top - bottom)
        assert float(label.attrib["y"]) - 4 == pytest.approx(expected, abs=0.6)  # pixels


def test_a_metric_with_two_names_is_charted_once() -> None:
    lines = [{"step": i, "reward.score": i / 4, "reward_mean": i / 4, "tokens": 9 + i} for i in range(4)]
    html = report_html(RunReport(PLAN, lines, {"status": "running"}))
    assert "<h3>reward_mean " in html and "<h3>reward.score " not in html and "<h3>tokens " in html


@pytest.mark.parametrize("key", [int, str], ids=["as run", "from summary.json"])
def test_evaluations_in_between_are_charted(key: type) -> None:
    """One point for each, where its steps are done; none without an evaluation."""
    found = {0: 0.1, 5: 0.5, 10: 0.4, 40: 0.8}
    by_step = {key(step): value for step, value in found.items()}
    summary = {**SUMMARY, "eval": {"before": 0.1, "after": 0.8, "by_step": by_step}}
    html = report_html(RunReport(PLAN, metric_lines(), summary))
    _, chart = html.split("<h3>held-out reward.score <span>0.8</span></h3>")
    (line,) = ET.fromstring(chart.split("</section>")[0]).iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    (left, low), (right, high) = points[0], points[-1]
    for (x, y), (step, value) in zip(points, found.items(), strict=True):
        assert x == pytest.approx(left + step / 40 * (right - left), abs=0.1)
        assert y == pytest.approx(low + (value - 0.1) / 0.7 * (high - low), abs=0.1)
    assert (
        "held-out"
        not in report_html(RunReport(PLAN, metric_lines(), {**SUMMARY, "eval": None})).split("Plan")[0]
    )


def test_different_metrics_of_equal_values_are_all_told() -> None:
    """As when every reward is 0: then the gradient is 0 too."""
    first, others = ("loss.actor_train", "reward_mean"), ("actor_train.grad_norm", "other.score")
    lines = [{"step": i, "reward.score": 0.0, **dict.fromkeys((*first, *others), 0.0)} for i in range(4)]
    html = report_html(RunReport(PLAN, lines, {"status": "running"}))
    assert all(f"<h3>{name} " in html for name in first) and "<h3>reward.score " not in html
    assert "<p>The same in every step, or below 1e-6: actor_train.grad_norm 0, other.score 0.</p>" in html


def test_what_changes_by_rounding_alone_has_no_chart() -> None:
    """A small rate of learning that rises is no rounding."""
    lines = [
        {
            "step": i,
            "a.lr": 1e-4,
            "b.lr": 1e-7 * i,
            "off": 3e-7 * i,
            "kl": 1e-4 * i,
            "gone": i and None,
        }
        for i in range(4)
    ]
    html = report_html(RunReport(PLAN, lines, {"status": "running"}))
    assert re.findall(r"<h3>(\S+) <span>", html) == ["b.lr", "gone", "kl"]
    assert "The same in every step, or below 1e-6: a.lr 0.0001, off 9e-07." in html


def test_evaluations_and_reward_come_first() -> None:
    summary = {**SUMMARY, "eval": {"before": 0.1, "after": 0.8, "by_step": {0: 0.1, 40: 0.8}}}
    charted = re.findall(r"<h3>([^<]*) <span>", report_html(RunReport(PLAN, metric_lines(), summary)))
    assert charted[:3] == ["held-out reward.score", "reward_mean", "loss.actor_train"]


def test_chart_of_nothing_and_of_a_constant() -> None:
    ET.fromstring(line_chart("loss", [], []))
    ET.fromstring(line_chart("loss", [0, 1], [0.0, 0.0]))
    ET.fromstring(line_chart("loss", [7], [-2.5]))


def test_notebook_bundles_have_picture_and_text_only() -> None:
    for bundle in (graph_bundle(GRAPH), plan_bundle(PLAN)):
        assert set(bundle) == {"image/svg+xml", "text/plain"}
        ET.fromstring(bundle["image/svg+xml"])
        assert "rollout" in bundle["text/plain"]
    assert GRAPH._repr_mimebundle_() == graph_bundle(GRAPH)


def test_a_run_shows_its_reward_and_tells_its_scores() -> None:
    lines = metric_lines()
    bundle = run_bundle("grpo-1", "finished", lines, {0: 0.117, 40: 0.806})
    (points,) = (e.attrib["points"] for e in ET.fromstring(bundle["image/svg+xml"]).iter(f"{SVG}polyline"))
    assert len(points.split()) == len(lines)
    assert titles(bundle["image/svg+xml"]) == ["reward_mean by step"]
    assert bundle["text/plain"].splitlines() == [
        "run grpo-1: finished, 40 steps",
        "  held out after 0 steps: 0.117",
        "  held out after 40 steps: 0.806",
    ]
    only_losses = [{"step": 0, "loss.actor_train": 1.0}]
    assert titles(run_bundle("sft", "running", only_losses, {})["image/svg+xml"]) == [
        "loss.actor_train by step"
    ]
    ET.fromstring(run_bundle("none", "failed", [], {})["image/svg+xml"])


def test_trace_keeps_times_and_never_overlaps_on_a_thread() -> None:
    events = [e for e in json.loads(chrome_trace(PLAN, measured_events()))["traceEvents"] if e["ph"] == "X"]
    planned = [e for e in events if e["pid"] == 1 and e["args"]["step"] == 0 and e["tid"] == 0]
    calls = [e for e in planned if e["cat"] == "call"]
    assert {e["name"]: e["dur"] / 1e6 for e in calls} == pytest.approx(
        {n.node: n.time_s for n in NODE_PLANS if 0 in n.mesh.devices}
    )
    assert len([e for e in events if e["pid"] == 2]) == len(measured_events())
    for thread in {(e["pid"], e["tid"]) for e in events}:
        own = sorted((e for e in events if (e["pid"], e["tid"]) == thread), key=lambda e: e["ts"])
        for first, second in pairwise(own):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-3


def test_trace_without_a_run_has_three_steps_of_the_plan() -> None:
    events = json.loads(chrome_trace(OFFLOAD_PLAN))["traceEvents"]
    assert {e["pid"] for e in events} == {1}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["step"] for e in spans} == {0, 1, 2}
    starts = [e["ts"] for e in spans if e["name"] == "rollout" and e["tid"] == 0]
    assert [b - a for a, b in pairwise(starts)] == pytest.approx(
        [OFFLOAD_PLAN.step_time_s * 1e6] * 2, rel=1e-3
    )


def test_trace_keeps_computing_and_moving_on_tracks_of_their_own() -> None:
    events = json.loads(chrome_trace(OFFLOAD_PLAN))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[0], names[1]} == {"device 0", "device 0 transfers"} and len(names) == 2 * 8
    found = {(e["cat"], "transfers" in names[e["tid"]]) for e in events if e["ph"] == "X"}
    moving = {(kind, True) for kind in ("transfer", "weights", "onload", "offload")}
    assert found == {("call", False)} | moving


def test_trace_of_many_devices_has_a_track_for_each_set() -> None:
    """Each device of the example becomes three, so that there are 24."""
    wide = tuple(
        replace(i, devices=tuple(3 * d + k for d in i.devices for k in range(3)))
        for i in PLAN.step.instructions
    )
    nodes = tuple(replace(n, mesh=Mesh.of(tuple(range(24)), dp=24)) for n in NODE_PLANS)
    plan = replace(PLAN, nodes=nodes, step=replace(PLAN.step, instructions=wide))
    events = json.loads(chrome_trace(plan))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"device 0-11", "device 0-11 transfers", "device 12-23", "device 12-23 transfers"}


def test_report_is_one_file_without_scripts() -> None:
    html = report_html(RunReport(PLAN, metric_lines(), SUMMARY, measured_events()))
    page = parse(html)
    assert "script" not in page.tags and not page.loaded and "@import" not in html
    assert page.tags.count("svg") == 3 + 4  # charts; graph, wide and narrow, planned and measured step
    assert "0.117 → 0.806" in html and "20 min 40 s" in html and "17.3 k" in html


def test_report_of_a_failed_run_says_why_and_needs_no_metrics() -> None:
    problem = Diagnostic("HF405", "node `actor_train`: loss is <nan>", help="lower lr")
    html = report_html(RunReport(PLAN, [], {"status": "failed"}, diagnostics=[problem]))
    parse(html)
    assert "loss is &lt;nan&gt;" in html and "lower lr" in html and "failed" in html
    assert "Predicted and measured" not in html


def test_measured_times_leave_the_first_step_out() -> None:
    lines = [{"step": i, "time_s.a": t} for i, t in enumerate([90.0, 1.0, 3.0, 2.0])]
    assert measured_times(lines) == {"a": 2.0}
    assert measured_times(lines[:1]) == {"a": 90.0}


def test_views_load_neither_torch_nor_ray() -> None:
    code = (
        "import sys, hflow.report.report, hflow.view.pages.notebook, hflow.report.trace;"
        "print(sorted({'torch', 'ray', 'megatron', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
