from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest

from hflow.plan.plan import Plan
from hflow.view.pages.plan_page import plan_html
from hflow.view.picture.memory_chart import memory_chart
from hflow.view.terminal.remarks import idle_fraction, path_names
from tests.view.examples import OFFLOAD_PLAN, PLAN
from tests.view.examples_in_time import LATE_PLAN, ROUNDS_PLAN
from tests.view.pages import parse

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("plan", [PLAN, OFFLOAD_PLAN, ROUNDS_PLAN, LATE_PLAN])
def test_a_plan_is_one_page_without_scripts(plan: Plan) -> None:
    html = plan_html(plan)
    page = parse(html)
    assert "script" not in page.tags and not page.loaded and "@import" not in html and "url(" not in html
    assert page.tags.count("svg") == 4  # graph, wide and narrow, time line, memory
    assert page.tags.count("table") == 2
    assert plan.hash in html and f"idle for {idle_fraction(plan):.0%}" in html


def test_the_time_line_has_three_steps() -> None:
    html = plan_html(PLAN)
    assert html.count("<title>rollout (call)") == 2 * 3  # for each of two sets of devices


def test_names_are_escaped() -> None:
    hostile = replace(PLAN, cluster=replace(PLAN.cluster, name="<script>x</script>"))
    assert "<script" not in plan_html(hostile)


def test_bars_of_memory_are_as_long_as_the_parts() -> None:
    svg = ET.fromstring(memory_chart(PLAN))
    capacity = [line for line in svg.iter(f"{SVG}line") if line.get("stroke-dasharray")][-1]
    groups = [g for g in svg.iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]
    rects = [g.find(f"{SVG}rect") for g in groups]
    boxes = [(float(r.attrib["x"]), float(r.attrib["width"])) for r in rects if r is not None]
    scale = (float(capacity.attrib["x1"]) - boxes[0][0]) / PLAN.memory[0].capacity_bytes
    sizes = [size for m in PLAN.memory for size in sorted(m.parts.values(), reverse=True)]
    assert [width for _, width in boxes] == pytest.approx([size * scale for size in sizes], abs=0.2)
    for (x, width), (after, _) in pairwise(boxes[:3]):
        assert x + width == pytest.approx(after, abs=0.2)


def test_a_bar_has_as_much_of_its_name_as_fits() -> None:
    """Of 20 GB of 80 GB, a quarter of a picture of 1,100 pixels, the layout is left out; of 1 GB all."""
    parts = {"actor weights (dp8 tp8 @0,2,4,6,8,10)": 20_000_000_000, "ref weights (dp8 @0-7)": 1_000_000_000}
    plan = replace(PLAN, memory=(replace(PLAN.memory[0], parts=parts),))
    texts = [text.text for text in ET.fromstring(memory_chart(plan)).iter(f"{SVG}text")]
    assert "actor weights" in texts
    assert not any("ref" in (text or "") or "dp8" in (text or "") for text in texts)


def test_no_line_ends_within_an_arrow() -> None:
    """HTML may break a line after a hyphen, but not before a word joiner."""
    path = re.search(r"<dt>path</dt><dd>(.*)</dd>", plan_html(PLAN))
    assert path and path[1].count("-\u2060&gt;") == len(path_names(PLAN)) - 1 and "-&gt;" not in path[1]


def test_memory_of_nothing_is_drawn() -> None:
    ET.fromstring(memory_chart(replace(PLAN, memory=())))
