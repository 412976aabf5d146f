"""Log-probs that meet in one node are of one distribution: of one temperature, and over the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hflow.graph.checks.log_probs import sampler_of
from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.kinds import generate
from hflow.graph.infer.regions import text_source
from hflow.graph.ir import Input, Node, Ref
from hflow.graph.source.problems import Problems
from hflow.graph.types import Distribution

_OF_A_DISTRIBUTION = ("behaviour", "scored", "support")
_READERS = ("train", "generate", "call", "score")
SUGGESTED = 64  # tokens, in help


def check_distributions(
    nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft], problems: Problems
) -> None:
    """HF212 log-probs that a node compares, or goes on from, are of different temperatures, or greedy. HF229
    they are over different tokens: one truncated, the others not or otherwise."""
    for node in (n for n in nodes.values() if n.op in _READERS):
        known = list(_log_probs(node, nodes))
        own = _own(node, known)
        if own is None:
            continue
        compared = known[0][1].name if node.op == "call" else node.name
        for value, source, made_at in known:
            at = drafts[node.name].input_path(value.port)
            if made_at.temperature == 0 and node.op not in ("generate", "score"):
                message = f"`{value.source}` is greedy (temperature 0)"
                problems.add("HF212", f"{message}: nothing was sampled, so it has no log-probs", at)
            elif made_at.temperature != own.temperature:
                mine, theirs = own.temperature, made_at.temperature
                message = f"`{compared}` has log-probs at temperature {mine}, `{source.name}` at {theirs}"
                path = at if node.op == "call" else (*drafts[node.name].path, "with", "temperature")
                problems.add("HF212", message, path, help="only at one temperature can they be compared")
            elif made_at.truncation != own.truncation:
                mine, theirs = (str(d.truncation) or "all tokens" for d in (own, made_at))
                message = f"`{compared}` has log-probs over {mine}, `{value.source}` over {theirs}"
                problems.add("HF229", message, at, help=_help(node, value, nodes, drafts))


def _log_probs(node: Node, nodes: Mapping[str, Node]) -> Iterator[tuple[Input, Node, Distribution]]:
    """The log-probs and kept sets that a node reads: the edge, who made them, and their distribution."""
    for value in node.inputs:
        made_by, source = value.type.provenance, behind(value.source, nodes)
        if made_by and made_by.role in _OF_A_DISTRIBUTION and source and "temperature" in source.options:
            yield value, source, made_by.distribution


def _own(node: Node, known: list[tuple[Input, Node, Distribution]]) -> Distribution | None:
    """That of the log-probs that a node makes itself, or else of the first that it reads."""
    if node.op == "call":
        return known[0][2] if known else None
    if "temperature" not in node.options:  # a bad one, which has been reported
        return None
    own = generate.distribution(node.options)
    kept = next((made_at for value, _, made_at in known if value.port == "kept"), None)
    if node.op == "generate" or kept is None:
        return own
    return replace(own, truncation=kept.truncation)


def _help(node: Node, value: Input, nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft]) -> str:
    """What to write where the sampler of the texts truncates, and somebody does not know its kept sets."""
    tokens = node.input("tokens")
    made = [n for v in node.inputs if (n := behind(v.source, nodes)) and n.op == "generate"]
    sampler = sampler_of(tokens, nodes) or next(iter(made), None)
    if node.op == "generate" or sampler is None or not generate.distribution(sampler.options).truncation:
        return "log-probs are compared over the same tokens only: write the same `top_p`, `top_k` and `min_p`"
    scorers = [n for v in node.inputs if (n := behind(v.source, nodes)) and n.op == "score"]
    lacking = [n.name for n in (node, *scorers) if n.op in ("train", "score") and not n.input("kept")]
    origin = tokens.type.dims[-1].factors[0].origin if tokens else None
    handed = text_source(origin, "kept", drafts) if origin and "max_kept" in sampler.options else None
    kept = handed or Ref(sampler.name, "kept")
    first = "" if "max_kept" in sampler.options else f"`max_kept: {SUGGESTED}` in `{sampler.name}`, and "
    where = ", ".join(f"`{name}`" for name in dict.fromkeys(lacking)) or f"`{node.name}`"
    return f"write {first}`kept: {kept}` under `in` of {where}: all then use the sampler's tokens"


def behind(ref: Ref, nodes: Mapping[str, Node]) -> Node | None:
    """The node that made a value, in the region where it was made."""
    node = nodes.get(ref.node)
    if node is None or node.op != "repeat":
        return node
    value = node.input(ref.port)
    return nodes.get(value.source.node) if value else None
