"""What a user sees while a run is going: a live line on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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

POLL_S, QUIET_POLL_S = 0.5, 1.0
GAP = "  "
# Of the name in a line, the metric and its format.
FURTHER = (("length", "response_length", ".1f"), ("kl", "kl", ".4f"), ("grad", "grad_norm", ".2f"))
BAR_WIDTH = 76  # of what stands beside the numbers in the live line


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
    ):
        """`shown`: the metrics in the line of a step; none: reward, losses, and what else fits."""
        self.steps, self.console, self.shown = steps, console, shown
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
        self.console.print(text, highlight=False, soft_wrap=True)

    def step(self, metrics: dict[str, Any]) -> None:
        if self._live:
            width = self.console.width - BAR_WIDTH
            text = _fitting(numbers(metrics, self.shown, width), width)
            self._live.update(self._task, completed=metrics["step"] + 1, numbers=text)
            return
        head = f"step {metrics['step'] + 1:>{len(str(self.steps))}}/{self.steps}"
        parts = numbers(metrics, self.shown, self.console.width - len(head) - len(GAP))
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


def numbers(metrics: Mapping[str, Any], shown: Sequence[str] = (), width: int = 0) -> list[str]:
    """``reward 0.42``, ``loss -0.0012``, ``5321 tokens/s``, ``0.81 s`` of one step's metrics; of several
    train nodes, the losses are named like ``loss.critic_train``.

    Args:
        shown: the metrics that stand there in place of reward and losses. One that the step has not is ``-``.
        width: characters of a line. Without `shown` it is filled with what fits of the single rewards, the
            length of responses, the KL divergence and the norm of the gradient, in this order.
    """
    chosen = [f"{name} {_short(metrics.get(name))}" for name in shown] or _usual(metrics)
    ends = [f"{metrics['tokens_per_s']:,.0f} tokens/s", f"{metrics['time_s']:.2f} s"]
    for part in () if shown else _further(metrics):
        if len(GAP.join([*chosen, part, *ends])) > width:
            break
        chosen.append(part)
    return [*chosen, *ends]


def _usual(metrics: Mapping[str, Any]) -> list[str]:
    parts = [f"reward {metrics['reward_mean']:.3f}"] if "reward_mean" in metrics else []
    losses = [name for name in metrics if name.startswith("loss.")]
    return parts + [f"{name if len(losses) > 1 else 'loss'} {metrics[name]:+.4f}" for name in losses]


def _further(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Of several nodes of a kind, the first one's; rewards where they are parts of a sum."""
    rewards = [name for name in metrics if name.endswith(".score")]
    for name in rewards if len(rewards) > 1 else ():
        yield f"{name.removesuffix('.score')} {metrics[name]:.3f}"
    for shown, metric, form in FURTHER:
        found = next((name for name in metrics if name.endswith(f".{metric}")), None)
        if found and isinstance(metrics[found], int | float):
            yield f"{shown} {metrics[found]:{form}}"


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
