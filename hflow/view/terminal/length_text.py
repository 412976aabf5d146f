"""Lengths of texts in words: those that a plan counts with, and those that a run has seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hflow.graph.ir import Graph, Node
from hflow.graph.lengths import Lengths
from hflow.graph.lengths_file import SeenLengths
from hflow.plan.plan import Plan
from hflow.plan.row_lengths import counted_at_greatest
from hflow.plan.workload import workload
from hflow.view.terminal.table import Column, table

COLUMNS: tuple[Column, ...] = (
    ("tokens", "left"),
    ("planned", "right"),
    ("mean", "right"),
    ("p50", "right"),
    ("p95", "right"),
    ("longest", "right"),
    ("of", "right"),
    ("texts", "right"),
)


def planned_lengths(graph: Graph) -> Iterator[str]:
    """One line about what is stated, and what counts at the greatest all the same; none where nothing is."""
    stated = [f"{what(node)} of {node.name} {short(node.lengths)}" for node in graph.nodes if node.lengths]
    if not stated:
        return
    greatest = counted_at_greatest(graph)
    rest = "; ".join(f"{texts} of {', '.join(names)}" for texts, names in greatest.items())
    yield f"{'; '.join(stated)}{f'; at the greatest: {rest}' if rest else ''}"


def planned_caches(plan: Plan) -> Iterator[str]:
    """Of each node whose rows in flight share a KV cache that does not hold the greatest length of all."""
    for node in (node for node in plan.nodes if node.cache_tokens):
        greatest = node.micro_batch * workload(plan.graph.node(node.node)).sequence
        share = f"{node.cache_tokens / greatest:.0%} of their greatest lengths"
        yield f"{node.node}: {node.cache_tokens:,} tokens for {node.micro_batch:,} rows in flight, {share}"


def seen_lengths(graph: Graph, seen: Mapping[str, SeenLengths], width: int = 100) -> str:
    """The lengths that a run has seen, beside the mean that was planned for; empty where it has seen none."""
    rows = [_seen(node, seen[node.name]) for node in graph.nodes if node.name in seen]
    return table(COLUMNS, rows, width) if rows else ""


def _seen(node: Node, seen: SeenLengths) -> tuple[str, ...]:
    own, quantiles = seen.lengths, dict(seen.lengths.quantiles)
    planned = node.lengths.mean if node.lengths else own.greatest
    numbers = planned, own.mean, quantiles["p50"], quantiles["p95"], own.longest, own.greatest
    return (f"{what(node)} of {node.name}", *map(_tokens, numbers), f"{seen.rows:,}")


def what(node: Node) -> str:
    """The texts whose lengths a node states."""
    return "prompts" if node.op == "data" else "responses"


def short(lengths: Lengths) -> str:
    """``1,019 tokens on average, 4,096 at most``."""
    return f"{_tokens(lengths.mean)} tokens on average, {lengths.greatest:,} at most"


def _tokens(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"
