"""What a user sees while a run is going: a live line on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hflow.graph.ir import Graph

POLL_S, QUIET_POLL_S = 0.5, 1.0
GAP = "  "
BAR_WIDTH = 76  # of what stands beside the numbers in the live line


@dataclass(frozen=True)
class FurtherMetric:
    """`name`: in a step's metrics; `label`, `form`: what a line calls it, and the format of its number."""

    name: str
    label: str
    form: str


def further_metrics(graph: Graph) -> tuple[FurtherMetric, ...]:
    """The rewards that the one of `graph` is made of, how long responses are, and of the first model that is
    sampled from and trained, the KL divergence and the norm of the gradient."""
    judges = [n for n in graph.nodes if n.op == "call" or (n.op == "score" and graph.model_of(n).frozen)]
    scores = [n.name for n in judges if n.output("score") and f"{n.name}.score" != graph.reward]
    samplers = [n for n in graph.nodes if n.op == "generate"]
    sampled = {n.model_use.model for n in samplers}
    trainers = [n for n in graph.nodes if n.op == "train"]
    trainers.sort(key=lambda n: n.model_use.model not in sampled)
    return (
        *(FurtherMetric(f"{name}.score", name, ".3f") for name in scores if graph.reward),
        *(FurtherMetric(f"{n.name}.response_length", "length", ".1f") for n in samplers[:1]),
        *(FurtherMetric(f"{n.name}.kl", "kl", ".4f") for n in trainers[:1]),
        *(FurtherMetric(f"{n.name}.grad_norm", "grad", ".2f") for n in trainers[:1]),
    )


class RunProgress:
    """A context manager; `where` tells the node that runs now and is asked from a background thread, in which
    `record` is called when it is another."""

    def __init__(
        self,
        steps: int,
        where: Callable[[], str],
        console: Console,
        record: Callable[[str], None] = lambda _: None,
        shown: Sequence[str] = (),
        further: Sequence[FurtherMetric] = (),
    ):
        """`shown`: the metrics in the line of a step; none: reward, losses, and what fits of `further`."""
        self.steps, self.console, self.shown, self.further = steps, console, shown, further
        self._where, self._record = where, record
        self._live = self._bar() if console.is_terminal else None
        self._stop = threading.Event()
        self._poller = threading.Thread(target=self._poll, daemon=True)

    def _bar(self) -> Progress:
        columns = (
            SpinnerColumn(),
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("[dim]{task.fields[node]:<16}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        return Progress(*columns, console=self.console, transient=True)

    def __enter__(self) -> RunProgress:
        if self._live:
            self._live.start()
            self._task = self._live.add_task("steps", total=self.steps, numbers="", node="")
        self._poller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._poller.join()  # it must not ask workers that are being ended
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, metrics: dict[str, Any]) -> None:
        if self._live:
            width = self.console.width - BAR_WIDTH
            text = _fitting(numbers(metrics, self.shown, self.further, width), width)
            self._live.update(self._task, completed=metrics["step"] + 1, numbers=text)
            return
        head = f"step {metrics['step'] + 1:>{len(str(self.steps))}}/{self.steps}"
        parts = numbers(metrics, self.shown, self.further, self.console.width - len(head) - len(GAP))
        self.say(GAP.join([head, *parts]))

    def _poll(self) -> None:
        last = ""
        while not self._stop.wait(POLL_S if self._live else QUIET_POLL_S):
            with suppress(Exception):  # a progress line must never end a run
                node = self._where()
                if self._live:
                    self._live.update(self._task, node=node)
                if node != last:
                    last = node
                    self._record(node)


def numbers(
    metrics: Mapping[str, Any],
    shown: Sequence[str] = (),
    further: Sequence[FurtherMetric] = (),
    width: int = 0,
) -> list[str]:
    """``reward 0.42``, ``loss -0.0012``, ``5321 tokens/s``, ``0.81 s`` of one step's metrics; of several
    train nodes, the losses are named like ``loss.critic_train``.

    Args:
        shown: the metrics that stand there in place of all others but the last two. One that the step has not
            is ``-``.
        further: what stands behind the losses, as far as a line of `width` characters has room.
    """
    chosen = [f"{name} {_short(metrics.get(name))}" for name in shown] or _usual(metrics)
    ends = [f"{metrics['tokens_per_s']:,.0f} tokens/s", f"{metrics['time_s']:.2f} s"]
    told = () if shown else (each for each in further if isinstance(metrics.get(each.name), int | float))
    for each in told:
        part = f"{each.label} {metrics[each.name]:{each.form}}"
        if len(GAP.join([*chosen, part, *ends])) > width:
            break
        chosen.append(part)
    return [*chosen, *ends]


def _usual(metrics: Mapping[str, Any]) -> list[str]:
    parts = [f"reward {metrics['reward_mean']:.3f}"] if "reward_mean" in metrics else []
    losses = [name for name in metrics if name.startswith("loss.")]
    return parts + [f"{name if len(losses) > 1 else 'loss'} {metrics[name]:+.4f}" for name in losses]


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _fitting(parts: Sequence[str], width: int) -> str:
    """As many of the parts, from the first, as fit into one line; the first in any case."""
    text = parts[0]
    for part in parts[1:]:
        if len(text) + len(GAP) + len(part) > width:
            return text
        text += GAP + part
    return text
