"""What options of train nodes ask of the run as a whole: its length, and other nodes of the same model."""

from __future__ import annotations

from collections.abc import Mapping

from hflow import units
from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.kinds.train import FALLING, frozen_patterns
from hflow.graph.ir import Node
from hflow.graph.source.problems import Problems


def check_schedules(
    nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft], steps: int, problems: Problems
) -> None:
    """HF212 a learning rate that has not enough updates to rise and to fall in.

    Args:
        steps: of the step loop.
    """
    for node in (n for n in nodes.values() if n.options.get("schedule") in FALLING):
        total, options = node.updates * steps, node.options
        warmup, decay = options.get("warmup_steps", 0), options.get("decay_steps", 0)
        has, path = f"the run has {units.plural(total, 'update')}", (*drafts[node.name].path, "with")
        if warmup >= total:
            message = f"`{node.name}` warms up for {units.plural(warmup, 'update')}, but {has}"
            help_ = "fewer `warmup_steps`, or more steps (`loop.times`)"
            problems.add("HF212", message, (*path, "warmup_steps"), help=help_)
        elif warmup + decay > total:
            message = f"`{node.name}` warms up for {warmup} and decays for {decay} updates, but {has}"
            problems.add("HF212", message, (*path, "decay_steps"), help="fewer `decay_steps`")


def check_freezes(nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """HF212 train nodes of one model, which share its optimizer, disagree on what they freeze."""
    first: dict[str, Node] = {}
    for node in (n for n in nodes.values() if n.op == "train"):
        other = first.setdefault(node.model_use.model, node)
        mine, theirs = (set(frozen_patterns(n)) for n in (node, other))
        if mine != theirs:
            writer = node if mine else other
            message = f"`{node.name}` and `{other.name}` train one model, but `freeze` differs"
            path = (*drafts[writer.name].path, "with", "freeze")
            problems.add("HF212", message, path, help="a model has one optimizer: write the same in both")
