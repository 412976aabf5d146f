"""How wide the interval around a prediction has to be, and whether it holds for what it was not made of.

    python benchmarks/intervals.py [--save]

Cases are the held-out rows of `benchmarks/published.py` (GPUs) and the runs of `benchmarks/calibrated.py`
(CPUs), of their newest results: nothing is predicted or run anew. By what is timed, the interval is that of
the ratios of measured to predicted times, without the `OUTSIDE` part of them, half at each end. How much it
holds is counted for each group of cases (a model of a system, or an algorithm) with the interval that the
other groups alone would give. What is printed has to be in `hflow/cost/prediction_interval.py`, as a test
checks. The last line is one JSON object; with --save it also goes to benchmarks/results/, and its table to
docs/predictions.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from statistics import median
from typing import Any

from hflow.cost.prediction_interval import Interval, TimedKind
from hflow.plan.engine_profile import Platform

ROOT = Path(__file__).resolve().parent
PAGE = ROOT.parent / "docs/predictions.md"
BEGIN, END = "<!-- Intervals: benchmarks/intervals.py -->\n", "<!-- End of intervals -->\n"
OUTSIDE = 0.15
OTHER_ENGINES = ("DeepSpeed-Chat", "NeMo-Aligner")  # whose generation is not what is predicted of them
KINDS: Mapping[str, TimedKind] = {
    "training": "train",
    "GRPO training": "train",
    "GRPO scores": "score",
    "generation": "generate",
    "GRPO rollout": "generate",
}
NODES: Mapping[str, TimedKind] = {
    "rollout": "generate",
    "greedy": "generate",
    "actor_train": "train",
    "critic_train": "train",
    "step": "step",
}  # of `calibrated.py`; all others score
WEIGHTS_ALONE = ("transition", "GRPO weights")  # of which no plan has an interval
DEVICES_PER_HOST = 8  # of the published steps
EXPERTS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`ratio`: of the measured time to the predicted one. `group`: of cases that are alike."""

    platform: Platform
    timed: TimedKind
    group: str
    ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Intervals around predictions.")
    parser.add_argument("--save", action="store_true", help="write results/intervals-DATE.json and the page")
    options = parser.parse_args()
    result = report(cases())
    print(table(result))
    line = json.dumps(result)
    if options.save:
        (ROOT / f"results/intervals-{result['date']}.json").write_text(line + "\n")
        PAGE.write_text(with_table(PAGE.read_text(), table(result)))
    print(line)


def cases() -> list[Case]:
    return [*published_cases(newest("published")), *measured_cases(newest("calibrated"))]


def newest(name: str) -> Json:
    """Results are named by date, so the last one is the newest."""
    return json.loads(max((ROOT / "results").glob(f"{name}-*.json")).read_text())


def published_cases(result: Json) -> Iterator[Case]:
    """Held-out rows of systems whose engines are predicted."""
    for row in result["rows"]:
        if "error" not in row or row["use"] != "held out" or row["system"] in OTHER_ENGINES:
            continue
        too_fast = 1 + row["error"]  # of tokens per second; of seconds too slow
        ratio = 1 / too_fast if row["unit"] == "s" else too_fast
        group = f"{row['system']} {row['model']}"
        if timed := KINDS.get(row["kind"]):
            yield Case("cuda", timed, group, ratio)
        elif row["kind"] not in WEIGHTS_ALONE:
            yield Case("cuda", _kind_of_step(row), group, ratio)


def _kind_of_step(row: Json) -> TimedKind:
    """Steps of models with experts are kept apart, and of these those that generate over several hosts."""
    tp = re.search(r"generate=\S*tp(\d+)", row.get("setting", ""))
    if tp and int(tp[1]) > DEVICES_PER_HOST:
        return "step over hosts"
    return "step with experts" if row["model"] in EXPERTS else "step"


def measured_cases(result: Json) -> Iterator[Case]:
    for case in result["cases"]:
        for each in case["times"]:
            timed = NODES.get(each["name"], "score")
            yield Case("cpu", timed, case["algorithm"], each["measured_s"] / each["predicted_s"])


def interval(ratios: Sequence[float], outside: float = OUTSIDE) -> Interval:
    """Of which at most the part `outside` lies outside, half at each end; rounded so that none comes to."""
    ordered, left_out = sorted(ratios), int(len(ratios) * outside / 2)
    low, high = (round(100 * x, 6) for x in (ordered[left_out], ordered[-1 - left_out]))
    return Interval(floor(low) / 100, ceil(high) / 100)


def interval_of(found: Sequence[Case], timed: TimedKind) -> Interval:
    """Of cases with experts, which are few, none is left out."""
    ratios = [case.ratio for case in found]
    return interval(ratios, 0.0) if timed in ("step with experts", "step over hosts") else interval(ratios)


def of_kind(found: Sequence[Case], platform: Platform, timed: TimedKind) -> list[Case]:
    """The cases that an interval is made of: that of steps with experts holds all other steps, too, and that
    of scores on GPUs, of which little is published, all training, whose forward pass they are."""
    also: dict[tuple[Platform, TimedKind], TimedKind] = {("cuda", "score"): "train"}
    also |= {(platform, "step with experts"): "step"}
    kinds = (timed, also.get((platform, timed)))
    return [case for case in found if case.platform == platform and case.timed in kinds]


def holds(case: Case, others: Sequence[Case]) -> bool:
    low, high = interval_of(others, case.timed)
    return low <= case.ratio <= high


def report(found: Sequence[Case]) -> Json:
    kinds = {(case.platform, case.timed): case for case in found}
    lines = [_line(found, case.platform, case.timed) for case in kinds.values()]
    gpu = [line for line in lines if line["platform"] == "cuda"]
    steps = [line for line in gpu if line["timed"].startswith("step")]
    return {
        "benchmark": "intervals",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "intervals": lines,
        "held_of_published": _held(gpu),
        "held_of_published_steps": _held(steps),
        "median_half_width_of_published": round(
            median((x["high"] - x["low"]) / 2 for x in gpu for _ in range(x["cases"])), 3
        ),
    }


def _held(lines: Sequence[Json]) -> float:
    return round(sum(x["held"] for x in lines) / max(1, sum(x["cases"] for x in lines)), 3)


def _line(found: Sequence[Case], platform: Platform, timed: TimedKind) -> Json:
    own = [case for case in found if (case.platform, case.timed) == (platform, timed)]
    used = of_kind(found, platform, timed)
    low, high = interval_of(used, timed)
    held = sum(holds(case, [other for other in used if other.group != case.group]) for case in own)
    return {"platform": platform, "timed": timed, "low": low, "high": high, "cases": len(own), "held": held}


def table(result: Json) -> str:
    """In Markdown, and what all lines of GPUs come to."""
    heads = ("what", "on", "interval, of what is predicted", "cases", "inside, by the other groups' interval")
    lines = [_cells(line) for line in result["intervals"]]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *lines))
    held, steps = result["held_of_published"], result["held_of_published_steps"]
    width = f"the median half-width is {result['median_half_width_of_published']:.1%}"
    return f"{text}\nOf all cases of GPUs {held:.0%} are inside, of steps {steps:.0%}; {width}.\n"


def _cells(line: Json) -> list[str]:
    on = {"cuda": "GPUs", "cpu": "CPUs"}[line["platform"]]
    return [
        line["timed"],
        on,
        f"{line['low']:.2f} to {line['high']:.2f}",
        str(line["cases"]),
        str(line["held"]),
    ]


def with_table(page: str, made: str) -> str:
    """The page with another table between its two marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + made + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    main()
