"""What holds for log-probs and the texts they are of: known age, the right sampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.regions import maker, text_source
from hflow.graph.ir import Input, Node, Ref
from hflow.graph.source.problems import Problems


def check_sampler(nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """HF210 a loss that compares with what was sampled learns from the texts of another model."""
    for node in _comparing(nodes, drafts):
        draft, text_of = drafts[node.name], sampler_of(node.input("tokens"), nodes)
        if not text_of:
            continue
        sampler, own = text_of.model_use.model, node.model_use.model
        if sampler != own:
            message = f"`{node.name}` learns from texts that `{sampler}` sampled"
            help_ = f"this loss is for texts that `{own}` itself has sampled"
            problems.add("HF210", message, draft.input_path("tokens"), help=help_)


def check_sampled_tokens(
    nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft], problems: Problems
) -> None:
    """HF210 a loss that compares with what was sampled, or whoever makes its log-probs, reads tokens that a
    function has made of sampled ones."""
    readers = {
        r.name: r for node in _comparing(nodes, drafts) for r in _readers_of_tokens(node, nodes, drafts)
    }
    for reader in readers.values():
        tokens = reader.input("tokens")
        sampler = sampler_of(tokens, nodes)
        if not tokens or not sampler:
            continue
        made_by = _inside(tokens.source, drafts).node
        if drafts[made_by].op == "call":
            message = f"`{reader.name}` reads tokens that `{made_by}` made of those of `{sampler.name}`"
            origin = tokens.type.dims[-1].factors[0].origin or sampler.name
            own = text_source(origin, "tokens", drafts)
            help_ = "log-probs are of tokens, not of texts" + (f": wire `{own}`" if own else "")
            problems.add("HF210", message, drafts[reader.name].input_path("tokens"), help=help_)


def _comparing(nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft]) -> Iterator[Node]:
    """Train nodes whose loss takes log-probs of what was sampled."""
    for node in (n for n in nodes.values() if n.op == "train"):
        signature = drafts[node.name].signature
        if signature and any(p.tag in ("old", "behaviour") for p in signature.inputs):
            yield node


def _readers_of_tokens(
    node: Node, nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft]
) -> Iterator[Node]:
    """A node, the generate and score nodes whose tokens or log-probs it reads, and the turns before these."""
    yield node
    for value in node.inputs:
        producer = nodes[_inside(value.source, drafts).node]
        if producer.op in ("generate", "score"):
            yield from _readers_of_tokens(producer, nodes, drafts)


def _inside(source: Ref, drafts: Mapping[str, NodeDraft]) -> Ref:
    """A value; of what a region hands out, what it is inside."""
    producer = drafts[source.node]
    return producer.sources.get(source.port, source) if producer.op == "repeat" else source


def sampler_of(tokens: Input | None, nodes: Mapping[str, Node]) -> Node | None:
    """The generate node that made the texts which enter at `tokens`."""
    origin = tokens.type.dims[-1].factors[0].origin if tokens else None
    node = nodes.get(maker(origin)) if origin else None
    return node if node and node.op == "generate" else None


def check_staleness(nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """HF223 a train node reads texts or values of the model it trains that are older than its `max_lag`."""
    for node in (n for n in nodes.values() if n.op == "train" and "max_lag" in n.options):
        allowed, reported = node.options["max_lag"], set[str]()
        for value in sorted(node.inputs, key=_is_derived):
            age = _age(node, value, nodes)
            if age <= allowed or value.source.node in reported or (reported and _is_derived(value)):
                continue
            reported.add(value.source.node)
            updates = "update" if age == 1 else "updates"
            message = f"`{value.source}` is of `{node.model_use.model}` {age} {updates} ago;"
            message += f" `{node.name}` allows {allowed}"
            help_ = _help_for_age(node, nodes[value.source.node], age)
            problems.add("HF223", message, drafts[node.name].input_path(value.port), help=help_)


def _help_for_age(node: Node, maker: Node, age: int) -> str:
    use = maker.model
    if use is None or use.lag <= 1:
        return f"set `max_lag: {age}` in `{node.name}`, and let its loss correct for the age"
    if maker.op != "score":
        return f"the compiler schedules `lag: 1`, and no more; then `max_lag: 1` in `{node.name}`"
    refresh = f"refresh: {{from: {use.model}, every: {use.lag}}}"
    return f"for scores by older weights, use a frozen model of its own that takes them over: `{refresh}`"


def _is_derived(value: Input) -> bool:
    """Made from values, and as old as these, which most often enter too, and are told first."""
    made_by = value.type.provenance
    return made_by is not None and made_by.role == "derived"


def _age(node: Node, value: Input, nodes: Mapping[str, Node]) -> int:
    """How many updates old the weights are that made a value; 0 unless `node` trains the model."""
    text_of = sampler_of(value, nodes) if value.port == "tokens" else None
    sampled = text_of.output("logprobs") if text_of else None
    made_by = sampled.type.provenance if sampled else value.type.provenance
    if not made_by or made_by.model != node.model_use.model:
        return 0
    region = nodes.get(text_of.region) if text_of else None
    waits = region and region.op == "repeat"  # another node may be called like the step loop
    return max(made_by.lag, region.options["max_age"] if region and waits else 0)
