"""The lengths of texts that a run has seen, added up over workers and steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from hflow.graph.ir import Graph
from hflow.graph.lengths_file import SeenLengths, lengths_text
from hflow.graph.lengths_of_run import GREATEST


class LengthCounts:
    """Of all steps that were added."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[int]] = defaultdict(Counter)

    def add(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Those of one step."""
        for report in reports:
            for node, counts in report["lengths"].items():
                self._counts[node].update(counts)

    def seen(self, graph: Graph) -> dict[str, SeenLengths]:
        """Of each node of the step that has made any texts."""
        nodes = [node for node in graph.nodes if self._counts.get(node.name)]
        return {n.name: SeenLengths.of(self._counts[n.name], n.options[GREATEST[n.op]]) for n in nodes}

    def text(self, graph: Graph) -> str:
        """Of ``lengths.json``; empty before there is anything to say."""
        seen = self.seen(graph)
        return lengths_text(seen) if seen else ""
