"""Pages as a browser lays them out, on a phone, a tablet and in two windows: measured from the DOM.

Needs Chromium, which CI installs; elsewhere the tests are skipped where it is missing.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.report.report import RunReport, report_html
from hflow.view.pages.plan_page import plan_html
from tests.compiler.workloads import large
from tests.view.test_pictures import PLAN, SUMMARY, measured_events, metric_lines

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (390, 800, 1000, 1600)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium"),
]

# A frame of a given width, which the page in it tells what it measured.
OUTER = """<!doctype html><pre id="out">nothing</pre>
<script>
addEventListener("message", event => { document.getElementById("out").textContent = event.data; });
</script>
<iframe src="page.html" style="border: 0; width: {width}px; height: 900px"></iframe>
"""
MEASURE = (Path(__file__).parent / "measure_page.js").read_text()

Box = tuple[float, float, float, float]


def measured(html: str, width: int, folder: Path) -> dict[str, Any]:
    """What the page tells of itself in a frame of `width` pixels."""
    (folder / "page.html").write_text(html.replace("</body>", f"<script>{MEASURE}</script></body>"))
    (folder / "outer.html").write_text(OUTER.replace("{width}", str(width)))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1700,1000", "--dump-dom",
        f"file://{folder / 'outer.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told and told[1] != "nothing", done.stderr[-500:]
    return json.loads(unescape(told[1]))


def overlap(a: Box, b: Box) -> float:
    """The smaller side of what two boxes share."""
    return min(min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1]))


def within(inner: Box, outer: Box) -> bool:
    """But for a pixel of rounding."""
    return (
        inner[0] >= outer[0] - 1
        and inner[2] <= outer[2] + 1
        and inner[1] >= outer[1] - 1
        and inner[3] <= outer[3] + 1
    )


def faults(found: dict[str, Any], width: int) -> list[str]:
    """What a reader of the page in a frame of `width` pixels would miss."""
    texts, pictures = found["texts"], found["pictures"]
    told = [f"the page is {found['wide']} wide"] if found["wide"] > width else []
    told += [
        f"cut off: {t['text']}"
        for t in texts
        if not t["scrolls"] and not 0 <= t["box"][0] <= t["box"][2] <= width
    ]
    pairs = ((a, b) for i, a in enumerate(texts) for b in texts[:i])
    told += [f"on each other: {a['text']}, {b['text']}" for a, b in pairs if overlap(a["box"], b["box"]) > 2]
    for picture in pictures:
        told += [f"out of a picture: {box}" for box in picture["texts"] if not within(box, picture["box"])]
        cards = picture["cards"]
        if cards and not 0 <= picture["box"][0] <= picture["box"][2] <= width:
            told.append("one has to scroll to see the graph")
        told += [
            f"out of a card: {box}" for card in cards for box in card["texts"] if not within(box, card["box"])
        ]
        crossing = (overlap(a["box"], b["box"]) for i, a in enumerate(cards) for b in cards[:i])
        told += [f"cards on each other by {by}" for by in crossing if by > 1]
    return told


def plan_page() -> str:
    return plan_html(hflow.compile(large("safe_rlhf", "llama-7b"), "a100x16", budget_s=5))


def report_page() -> str:
    return report_html(RunReport(PLAN, metric_lines(), SUMMARY, measured_events()))


@pytest.mark.parametrize("page", [plan_page, report_page], ids=lambda page: page.__name__)
def test_nothing_is_cut_off_and_nothing_overlaps(page: Callable[[], str], tmp_path: Path) -> None:
    html = page()
    for width in WIDTHS:
        found = measured(html, width, tmp_path)
        assert found["width"] == width and len(found["texts"]) > 100
        (graph,) = [picture for picture in found["pictures"] if picture["cards"]]
        assert len(graph["cards"]) > 5
        assert not faults(found, width), width


def test_faults_are_seen(tmp_path: Path) -> None:
    """Else the test above proves nothing."""
    html = report_page()
    wide = html.replace("</body>", '<p style="width: 500px">wide</p></body>')
    assert "the page is" in faults(measured(wide, 390, tmp_path), 390)[0]
    beside = '<p style="position: absolute; left: -20px">left</p>'
    assert "cut off: left" in faults(
        measured(html.replace("</body>", f"{beside}</body>"), 1000, tmp_path), 1000
    )
    broad = html.replace(".picture.broad { display: none; }", "")
    assert "one has to scroll to see the graph" in faults(measured(broad, 390, tmp_path), 390)
    twice = '<p style="position: absolute; top: 99px">one</p><p style="position: absolute; top: 99px">two</p>'
    seen = faults(measured(html.replace("</body>", f"{twice}</body>"), 1000, tmp_path), 1000)
    assert "on each other: two, one" in seen
    shown = measured(html, 1000, tmp_path)
    card = next(card for picture in shown["pictures"] for card in picture["cards"])
    card["texts"][0][2] = card["box"][2] + 5
    assert [fault for fault in faults(shown, 1000) if fault.startswith("out of a card")]
