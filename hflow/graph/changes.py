"""What differs between the graph that a checkpoint was made with and the graph that is to go on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.graph.change_meaning import fits_waiting, is_harmless, is_possible, meaning
from hflow.graph.ir import Graph, Ref
from hflow.graph.keyed_values import keyed_values
from hflow.graph.source.yaml_text import flow
from hflow.graph.types import ValueType

ABSENT = "absent"
MAX_SHOWN = 80  # characters of a value

KeyedValues = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Change:
    """A key of graph files whose value differs.

    `harmless`: training is the same, so nobody need be asked. `possible`: what the checkpoint holds fits, so
    it may be allowed.
    """

    key: str
    before: str
    after: str
    meaning: str
    harmless: bool
    possible: bool = True


def changes(old: Graph, new: Graph) -> tuple[Change, ...]:
    """Every difference, named at its cause, in the order of `new`; what is gone comes last.

    Types that follow from another difference are not repeated, nor is what stands within something that came
    or went. Places in files, and the order in which things are written, are no differences.
    """
    before, after = keyed_values(old), keyed_values(new)
    differing = [key for key in dict.fromkeys((*after, *before)) if before.get(key) != after.get(key)]
    told = [key for key in differing if not _is_within(key, before, after)]
    told = [key for key in told if not _follows(key, told, old, new)]
    return tuple(
        Change(
            key,
            _text(before.get(key)),
            _text(after.get(key)),
            meaning(key, old, new),
            is_harmless(key, old, new),
            is_possible(key, old, new),
        )
        for key in told
    )


def check_changes(old: Graph, new: Graph, allowed: Sequence[str] = ()) -> tuple[Change, ...]:
    """The differences with which the run goes on: harmless ones, and those that the user allows.

    Args:
        allowed: keys; one allows all below it.

    Raises:
        HflowError: HF411 for every other difference, and for every key of `allowed` at which none is.
    """
    found = changes(old, new)
    refused = [_refusal(c) for c in found if not (c.harmless or (c.possible and _is_allowed(c, allowed)))]
    unknown = [_unknown(key, found) for key in allowed if not any(_is_allowed(c, [key]) for c in found)]
    if refused or unknown:
        raise HflowError((*refused, *unknown))
    return found


def _is_allowed(change: Change, allowed: Sequence[str]) -> bool:
    return any(change.key == key or change.key.startswith(f"{key}.") for key in allowed)


def _refusal(change: Change) -> Diagnostic:
    message = f"`{change.key}` was {change.before}, and is {change.after}: {change.meaning}"
    if not change.possible:
        help_ = "this checkpoint cannot go on with it: change it back, or start a new run"
        return Diagnostic("HF411", message, help=help_)
    return Diagnostic("HF411", message, help=f"`--allow {change.key}` goes on with it")


def _unknown(key: str, found: Sequence[Change]) -> Diagnostic:
    message = f"`--allow {key}`: nothing differs from the checkpoint's graph there"
    return Diagnostic("HF411", message, help=did_you_mean(key, [c.key for c in found], "what differs"))


def _is_within(key: str, before: KeyedValues, after: KeyedValues) -> bool:
    """Whether a key stands below something that came or went, or that is another thing of the same name."""
    parts = key.split(".")
    above = [".".join(parts[:number]) for number in range(1, len(parts))]
    if (key in before) != (key in after) and any((a in before) != (a in after) for a in above):
        return True
    return any(_is_whole(a) and before.get(a) != after.get(a) for a in above)


def _is_whole(key: str) -> bool:
    """Whether the value at a key, a kind of node or a function, decides what all below it means."""
    match key.split("."):
        case ["nodes", _] | ["nodes", _, "fn" | "loss"]:
            return True
        case _:
            return False


def _follows(key: str, told: Sequence[str], old: Graph, new: Graph) -> bool:
    """Whether a type differs only since something before it does."""
    match key.split("."):
        case ["nodes", _, "in", _, "type"] if not is_possible(key, old, new):
            return False
        case ["nodes", name, "in", port, "type"] | ["nodes", name, "until", port, "type"]:
            return _reads_as_made(name, port, old) and _reads_as_made(name, port, new)
        case ["nodes", name, "out", port, *_] if _is_made_type(key, old) and _is_made_type(key, new):
            reads = _reads_as_made(name, port, old) and _reads_as_made(name, port, new)
            return reads and fits_waiting(name, port, old, new) and _has_cause(name, told, old, new)
        case _:
            return False


def _is_made_type(key: str, graph: Graph) -> bool:
    """Whether the value at a key is the type of an output, which a node that collects has under `type`."""
    match key.split("."):
        case ["nodes", name, "out", port, *rest]:
            found = next((n for n in graph.nodes if n.name == name), None)
            is_type = rest == (["type"] if found and found.op == "repeat" else [])
            return is_type and found is not None and found.output(port) is not None
        case _:
            return False


def _reads_as_made(name: str, port: str, graph: Graph) -> bool:
    """Whether the type of an input is that of its source; true where there is no such input."""
    value = graph.node(name).input(port)
    return value is None or value.type == graph.node(value.source.node).type_of(value.source.port)


def _has_cause(name: str, told: Sequence[str], old: Graph, new: Graph) -> bool:
    """Whether a node, what it reads, or a model differs: the types of its outputs follow from these."""
    own = [key for key in told if key.startswith((f"nodes.{name}.", "models."))]
    read = [{i.port: i.type for i in graph.node(name).inputs} for graph in (old, new)]
    return read[0] != read[1] or not all(_is_made_type(key, new) for key in own)


def _text(values: tuple[Any, ...] | None) -> str:
    if values is None:
        return ABSENT
    text = ", ".join(dict.fromkeys(map(_value_text, values)))
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def _value_text(value: Any) -> str:
    """As graph files write it; of a type, its sizes too."""
    if isinstance(value, ValueType):
        sizes = {f"{f.name}={f.size}": None for dim in value.dims for f in dim.factors}
        return f"{value} ({', '.join(sizes)})" if sizes else str(value)
    return str(value) if isinstance(value, Ref) else flow(value)
