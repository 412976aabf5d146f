"""How algorithms learn the sums of the demo: what `benchmarks/learning.py` measured, drawn and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import mean, stdev
from typing import Any

from hflow.view.picture.chart import line_chart
from scripts.site.sitemap import ROOT

HEAD = """\
# Learning curves

Every algorithm begins with one model, which supervised training has taught to answer {first:.0%} of two-digit
sums, and trains on {answers:,} answers with the settings of its file; {seeds}, on {machine},
{date} (`python benchmarks/learning.py`). Figures are greedy answers to 512 held-out sums that are exactly
right.

They tell how much each gets out of an answer to one tiny task with one learning rate, not how they compare
elsewhere. PPO and Safe RLHF have the rule as their reward, as all others do; the teacher of on-policy
distillation is a model that GRPO trained. Safe RLHF and DPO are told right answers by a loss and by
pairs, of sums that are not held out. GRPO with a tool is not among them: this model knows no tags with which
to call one. TRL's trainers have the same model and sums, and the same settings as
far as it has them.
"""


@cache
def measured() -> Mapping[str, Any]:
    """The newest result; empty where there is none."""
    files = sorted((ROOT / "benchmarks/results").glob("learning-*.json"))
    return json.loads(files[-1].read_text()) if files else {}


def curve_of(name: str) -> str:
    """The curve of an algorithm and what it ends with, as Markdown; empty where it was not measured."""
    found = measured().get("algorithms", {}).get(name)
    if not found:
        return ""
    steps = [int(answers) for answers in found["curve"]]
    chart = line_chart(
        "held-out sums answered right", steps, [mean(each) for each in found["curve"].values()]
    )
    others = "".join(f"; {who} {_share(finals)}" for who, finals in found.get("others", {}).items())
    text = f"{_share(found['final'])} of held-out sums after {max(steps):,} answers{others}"
    return f'<div class="curve">{chart}</div>\n\n{text}. [All algorithms](../learning.md).'


def learning_page() -> str:
    """All algorithms, the best first."""
    found = measured()
    if not found:
        return "# Learning curves\n\nNothing was measured yet.\n"
    by = sorted(found["algorithms"].items(), key=lambda each: -mean(each[1]["final"]))
    first = mean(mean(next(iter(each["curve"].values()))) for _, each in by)
    counts = sorted({len(each["final"]) for _, each in by})
    seeds = " to ".join(map(str, counts[:1] + counts[1:][-1:])) + " seeds"
    head = HEAD.format(
        first=first, answers=found["answers"], seeds=seeds, machine=found["machine"], date=found["date"]
    )
    rows = [
        f"| [{name}](algorithms/{name}.md) | {each['steps']} | {_share(each['final'])} | {_others(each)} |"
        for name, each in by
    ]
    table = "\n".join(["| algorithm | steps | right at the end | others |", "|---|---|---|---|", *rows])
    return f"{head}\n{table}\n"


def _others(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{who}: {_share(finals)}" for who, finals in found.get("others", {}).items())


def _share(finals: Sequence[float]) -> str:
    spread = f" ± {stdev(finals):.1%}" if len(finals) > 1 else ""
    return f"{mean(finals):.1%}{spread}"
