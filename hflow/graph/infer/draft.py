"""A node before type inference: everything checked that needs no types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hflow.diagnostics import Span
from hflow.graph.infer.signature import Port, Signature
from hflow.graph.ir import Function, Head, ModelUse, OpKind, Ref, Repeat
from hflow.graph.lengths import Lengths
from hflow.graph.source.document import KeyPath
from hflow.graph.types import ValueType

KEEP = "keep"  # the input of a region that says which rows leave it


@dataclass(frozen=True)
class CarriedInput:
    """An input reads the value of `lag` steps ago, or `init`, None where the file does not say it."""

    lag: int
    init: float | None = None


@dataclass(frozen=True)
class NodeDraft:
    """What a node's file entry says.

    `inputs` and `outputs` are None when they depend on a function that could not be read, on a model that
    the file does not have, or (inputs of a region) on the types that leave it. `options` holds checked
    values only: one that is bad or missing is left out, and has been reported. `declared` holds the
    types of `out:`. `head` is that of the model, None where there is none. `carried` has the inputs
    that cross steps. `place` is where the node stands in its file, `region` the loop that it stands in.
    """

    name: str
    op: OpKind
    inputs: tuple[Port, ...] | None
    outputs: tuple[str, ...] | None
    sources: Mapping[str, Ref] = field(default_factory=dict[str, Ref])
    model: ModelUse | None = None
    head: Head | None = None
    function: Function | None = None
    signature: Signature | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    written: frozenset[str] = frozenset()
    declared: Mapping[str, ValueType] = field(default_factory=dict[str, ValueType])
    carried: Mapping[str, CarriedInput] = field(default_factory=dict[str, CarriedInput])
    after: tuple[str, ...] = ()
    repeat: Repeat | None = None
    region: str = "step"
    place: KeyPath = ()
    span: Span | None = None
    input_spans: Mapping[str, Span] = field(default_factory=dict[str, Span])
    lengths: Lengths | None = None

    @property
    def path(self) -> KeyPath:
        """Where the node stands in its file."""
        return self.place or ("nodes", self.name)

    @property
    def in_region(self) -> bool:
        """Whether the node stands in a ``repeat`` node rather than in the step loop."""
        return len(self.place) > 2

    def input_path(self, port: str) -> KeyPath:
        """Where the file says what enters at `port`."""
        if self.op == "data":
            return (*self.path, "with", "curriculum", port)
        if self.op != "repeat":
            return (*self.path, "in", port)
        return (*self.path, "until", "keep") if port == KEEP else (*self.path, "out", port)
