"""Regions: which references may cross their border, and the types of what leaves them.

The rows that a region hands out are those for which `keep` is true, collected over its rounds. They are
new rows: their first factor (one prompt of the region's data node) is made by the region, with the
number of rows that it collects as its size; the samples of a prompt stay together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from hflow.graph.infer.draft import KEEP, NodeDraft
from hflow.graph.ir import Node, Ref
from hflow.graph.source.problems import Problems
from hflow.graph.types import Dim, Factor, ValueType


def check_borders(drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """HF224: a node reads across the border of a region."""
    for draft in drafts.values():
        for port, ref in draft.sources.items():
            producer = drafts.get(ref.node)
            if producer is None or readable(draft, ref, drafts):
                continue
            if producer.outputs is not None and ref.port not in producer.outputs:  # which is HF201
                continue
            message, help_ = _crossing(draft, ref, producer, drafts)
            problems.add("HF224", message, draft.input_path(port), help=help_)
        for number, name in enumerate(() if draft.in_region else draft.after):
            if name in drafts and drafts[name].in_region:
                region = drafts[name].region
                message = f"`{name}` stands in the region `{region}`"
                path = (*draft.path, "after", number)
                problems.add("HF224", message, path, help=f"write `after: {region}`")


def reads_in(draft: NodeDraft) -> str:
    """The loop whose values a node reads: a region reads what its own nodes made."""
    return draft.name if draft.op == "repeat" else draft.region


def readable(draft: NodeDraft, ref: Ref, drafts: Mapping[str, NodeDraft]) -> bool:
    """Whether a value is made in the loop whose values the node reads."""
    producer = drafts.get(ref.node)
    return producer is not None and producer.region == reads_in(draft)


def _crossing(
    draft: NodeDraft, ref: Ref, producer: NodeDraft, drafts: Mapping[str, NodeDraft]
) -> tuple[str, str]:
    if draft.op == "repeat":
        return f"`{ref}` is made outside the region `{draft.name}`", "a region hands out its own values"
    if draft.in_region:
        help_ = "nodes of a region read each other only"
        return f"`{ref}` is made outside the region `{draft.region}`", help_
    region, message = drafts[producer.region], f"`{ref}` is made in the region `{producer.region}`"
    if handed := [port for port, source in region.sources.items() if source == ref and port != KEEP]:
        return message, f"read `{region.name}.{handed[0]}`"
    return message, f"hand it out (`out: {{{ref.port}: {ref}}}`) and read `{region.name}.{ref.port}`"


def output_types(
    draft: NodeDraft, types: Mapping[Ref, ValueType], trained: Set[str], problems: Problems
) -> dict[str, ValueType] | None:
    """The types of what a region hands out; None, after reporting HF224, where they cannot be.

    Args:
        trained: models, whose samples and values grow old while they wait.
    """
    keep = types[draft.sources[KEEP]]
    if keep.dtype != "bool" or len(keep.dims) != 1 or len(keep.dims[0].significant) != 1:
        message = f"`keep` says for every prompt whether it is kept, `bool[batch]`, but is `{keep}`"
        help_ = "a function says so, like `hflow.ops.filters.mixed_groups`"
        problems.add("HF224", message, draft.input_path(KEEP), help=help_)
        return None
    (kept,) = keep.dims[0].significant
    rows, times = draft.options["rows"], draft.options["times"]
    if keep.rows * times < rows:
        most = f"{times} round{'s' * (times > 1)} of {keep.rows} rows are at most {keep.rows * times}"
        message = f"{most}, fewer than {rows}"
        problems.add(
            "HF224", message, (*draft.path, "until", "rows"), help="draw more rows, or raise `times`"
        )
        return None
    made: dict[str, ValueType] = {}
    for port, ref in draft.sources.items():
        if port == KEEP:
            continue
        type_ = types[ref]
        if not type_.dims or type_.dims[0].factors[0] != kept:
            message = f"`{ref}` is `{type_}`: it does not have the rows of `{draft.sources[KEEP]}`"
            problems.add("HF224", message, draft.input_path(port))
            return None
        made[port] = _collected(draft, _aged(draft, type_, trained), kept)
    return made


def _aged(draft: NodeDraft, type_: ValueType, trained: Set[str]) -> ValueType:
    """As old as the region lets it become."""
    made_by = type_.provenance
    if not made_by or made_by.model not in trained:
        return type_
    return replace(type_, provenance=replace(made_by, lag=max(made_by.lag, draft.options["max_age"])))


def check_ages(drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """HF224: a surplus is too old for the next step at once."""
    for draft in (d for d in drafts.values() if d.op == "repeat" and d.options["max_age"]):
        age = sample_age(d for d in drafts.values() if d.region == draft.name)
        if age >= draft.options["max_age"]:
            updates = "1 update" if age == 1 else f"{age} updates"
            message = f"`max_age` has no effect: what a row holds is {updates} old when it is made"
            help_ = f"a surplus waits for a step with `max_age: {age + 1}`"
            path = (*draft.path, "until", "max_age")
            problems.add("HF224", message, path, key=True, help=help_)


def sample_age(nodes: Iterable[NodeDraft | Node]) -> int:
    """Of what the nodes of a region sample, or say of it, in updates, when it is made."""
    return max((n.model.lag for n in nodes if n.model), default=0)


def _collected(draft: NodeDraft, type_: ValueType, kept: Factor) -> ValueType:
    rows = Dim((Factor(kept.name, draft.options["rows"], draft.name), *type_.dims[0].factors[1:]))
    texts = tuple(_within(draft.name, dim) for dim in type_.dims[1:])
    return replace(type_, dims=(rows, *texts))


def _within(region: str, dim: Dim) -> Dim:
    """A dim of texts that left a region: those of one node inside are still told from those of another."""
    return replace(dim, factors=tuple(replace(f, origin=f"{region}/{f.origin}") for f in dim.factors))


def text_source(origin: str, port: str, drafts: Mapping[str, NodeDraft]) -> Ref | None:
    """The value `port` of the node that made a text, as nodes outside its region read it; None when it makes
    none, or does not hand it out."""
    region, _, inner = origin.rpartition("/")
    if not region:
        return Ref(origin, port) if port in (drafts[origin].outputs or ()) else None
    handed = (p for p, ref in drafts[region].sources.items() if p != KEEP and ref == Ref(inner, port))
    return next((Ref(region, p) for p in handed), None)


def maker(origin: str) -> str:
    """The node that made a text, in whichever region."""
    return origin.rpartition("/")[2]
