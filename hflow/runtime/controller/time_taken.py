"""How long the workers took for what they did in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hflow.runtime.controller.worker_failure import WorkerReport

_MOVES = ("transfer", "weights")  # kinds of events in which workers do nothing but exchange


def time_taken(
    reports: Sequence[WorkerReport], together: Collection[str] = ()
) -> Iterator[tuple[tuple[str, str], float]]:
    """What was done, by kind and name, and for how many seconds, once for each time: those of the slowest
    worker. Workers that exchange have waited for the last to come; only the time from then on is theirs.

    Args:
        together: nodes whose workers exchange.
    """
    rounds: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for report in reports:
        numbers: dict[tuple[str, str], int] = defaultdict(int)
        for event in report["events"]:
            key = event["kind"], event["name"]
            rounds[*key, numbers[key]].append(event)
            numbers[key] += 1
    for (kind, name, _), events in rounds.items():
        last_s = max(e["start_s"] for e in events)
        own_s = max(e["end_s"] - e["start_s"] for e in events)
        exchange = kind in _MOVES or name in together
        yield (kind, name), max(e["end_s"] for e in events) - last_s if exchange else own_s
