"""One picture of a run on a terminal: how far it is, what it does, its curves, predicted beside measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from rich.text import Text

from hflow import units
from hflow.report.watch.watched_run import WatchedRun
from hflow.units import printable
from hflow.view.terminal.terminal import measured_text

BARS = "▁▂▃▄▅▆▇█"
RECENT = 20  # steps that tell how long one takes
NAME, VALUE, CURVES = 28, 10, 12
FIRST = ("reward_mean", "loss.", "tokens_per_s")  # curves in this order, then all others by name
ENDINGS = (".grad_norm", ".response_length", ".kl", ".entropy", ".clip_fraction", ".mismatch")
STYLES = {"running": "bold cyan", "finished": "bold green"}


def frame(run: WatchedRun, width: int) -> Text:
    """What is shown, in lines of at most `width` columns."""
    parts = [_head(run, width), *_facts(run)]
    if curves := list(_curves(run, width)):
        parts += [Text(), *curves]
    if run.plan and run.metrics:
        parts += [Text(), *map(Text, measured_text(run.plan, run.metrics, width).splitlines())]
    for part in parts:
        part.truncate(width, overflow="ellipsis")
    return Text("\n").join(parts)


def _head(run: WatchedRun, width: int) -> Text:
    steps = f"/{run.plan.graph.steps}" if run.plan else ""
    name = printable(run.folder.name)
    text = Text(name if len(name) <= width // 2 else name[: width // 2 - 1] + "…", "bold")
    text.append(f"  {run.status}", STYLES.get(run.status, "bold red"))
    return text.append(f"  step {_done(run)}{steps}")


def _facts(run: WatchedRun) -> Iterator[Text]:
    recent = [line["time_s"] for line in run.metrics[-RECENT:]]
    if run.status == "running" and run.began:
        left = _left_s(run, recent)
        of = f", about {units.duration(left)} left" if left is not None else ""
        yield Text(f"time     {units.duration(run.looked - run.began)}{of}")
    if run.node:
        yield Text(f"now      {printable(run.node)}, for {units.duration(run.looked - run.node_since)}")
    if recent:
        predicted = f", {units.seconds(run.plan.step_time_s)} predicted" if run.plan else ""
        rate = run.metrics[-1].get("tokens_per_s")
        speed = f"{rate:,.0f} tokens/s, " if isinstance(rate, int | float) else ""
        yield Text(f"speed    {speed}{units.seconds(median(recent))} a step{predicted}")
    if not run.metrics:
        yield Text("no step has ended yet", "dim")


def _left_s(run: WatchedRun, recent: Sequence[float]) -> float | None:
    """Seconds to the end, by the last steps or, before any has ended, by the plan."""
    if run.plan is None:
        return None
    step_s = median(recent) if recent else run.plan.step_time_s
    return step_s * (run.plan.graph.steps - _done(run))


def _done(run: WatchedRun) -> int:
    return run.metrics[-1]["step"] + 1 if run.metrics else 0


def _curves(run: WatchedRun, width: int) -> Iterator[Text]:
    for name, by_step in run.evaluations.items():
        yield _curve(name, [by_step[step] for step in sorted(by_step)], width)
    for name in _charted(run)[:CURVES]:
        yield _curve(name, [line.get(name) for line in run.metrics], width)


def _charted(run: WatchedRun) -> list[str]:
    """Names of what is worth a curve, the most important first."""
    numbers = {n for line in run.metrics[-RECENT:] for n, v in line.items() if isinstance(v, int | float)}
    chosen = [n for n in numbers if n.startswith(FIRST) or n.endswith(ENDINGS)]
    if run.plan:
        values = {f"{n.name}.{o.port}" for n in run.plan.graph.nodes if n.op == "call" for o in n.outputs}
        shown_once = {run.plan.graph.reward} if "reward_mean" in numbers else set[str]()
        chosen += sorted((values & numbers) - shown_once - set(chosen))
    return sorted(chosen, key=_importance)


def _importance(name: str) -> tuple[int, str]:
    return next((n for n, start in enumerate(FIRST) if name.startswith(start)), len(FIRST)), name


def _curve(name: str, values: Sequence[object], width: int) -> Text:
    numbers = [float(v) if isinstance(v, int | float) else math.nan for v in values]
    known = [v for v in numbers if math.isfinite(v)]
    latest = f"{known[-1]:.4g}" if known else "-"
    room = max(8, width - NAME - VALUE - 2)
    label = name if len(name) <= NAME else name[: NAME - 1] + "…"
    text = Text(f"{printable(label):<{NAME}} ").append(f"{sparkline(numbers, room):<{room}}", "cyan")
    return text.append(f" {latest:>{VALUE}}", "bold")


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars from the least to the greatest, in at most `width` columns of means; a blank for what is
    not finite."""
    columns = [_mean(part) for part in _parts(values, width)]
    known = [value for value in columns if math.isfinite(value)]
    if not known:
        return " " * len(columns)
    least, span = min(known), max(known) - min(known)
    return "".join(_bar((value - least) / span if span else value - least + 0.5) for value in columns)


def _bar(share: float) -> str:
    return BARS[min(len(BARS) - 1, int(share * len(BARS)))] if math.isfinite(share) else " "


def _parts(values: Sequence[float], width: int) -> Iterator[Sequence[float]]:
    count = min(len(values), width)
    for number in range(count):
        yield values[number * len(values) // count : (number + 1) * len(values) // count]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
