"""A node before type inference: everything checked that needs no types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hflow.diagnostics import Span
from hflow.graph.graph import Function, ModelUse, OpKind, Ref, Repeat
from hflow.graph.signature import Port, Signature
from hflow.graph.types import ValueType


@dataclass(frozen=True)
class Draft:
    """What a node's file entry says.

    `inputs` and `outputs` are None when they depend on a function that could not be read. `options`
    holds checked values only: one that is bad or missing is left out, and has been reported.
    `declared` holds the types of `out:`. `known_model` is False for a model that the file does not have.
    """

    name: str
    op: OpKind
    inputs: tuple[Port, ...] | None
    outputs: tuple[str, ...] | None
    sources: Mapping[str, Ref] = field(default_factory=dict[str, Ref])
    model: ModelUse | None = None
    known_model: bool = True
    function: Function | None = None
    signature: Signature | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    written: frozenset[str] = frozenset()
    declared: Mapping[str, ValueType] = field(default_factory=dict[str, ValueType])
    repeat: Repeat | None = None
    region: str = "step"
    span: Span | None = None
    input_spans: Mapping[str, Span] = field(default_factory=dict[str, Span])

    @property
    def path(self) -> tuple[str, str]:
        """Where the node stands in its file."""
        return ("nodes", self.name)
