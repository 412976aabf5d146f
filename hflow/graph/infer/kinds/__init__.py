"""The kinds of nodes: one file per `op`, with its options, its ports and its output types. A `call` is all
in its function, a `repeat` in the nodes of its region (`hflow.graph.infer.regions`)."""

from __future__ import annotations

from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.kinds import data, generate, score, train
from hflow.graph.infer.signature import Port, Signature
from hflow.graph.infer.unify import Bindings
from hflow.graph.ir import OpKind
from hflow.graph.types import ValueType


def input_ports(op: OpKind, function: Signature | None) -> tuple[Port, ...] | None:
    """The inputs of a node; None when they depend on a function that could not be read."""
    match op:
        case "data":
            return ()
        case "generate":
            return generate.INPUTS
        case "score":
            return score.INPUTS
        case "train":
            return train.inputs(function) if function else None
        case "call":
            return function.inputs if function else None
        case "repeat":
            return None


def output_ports(op: OpKind, function: Signature | None) -> tuple[str, ...] | None:
    """The outputs of a node that its op or its function knows; those of a `score` node depend on its model,
    `data` and `repeat` nodes declare theirs."""
    match op:
        case "data" | "train" | "repeat":
            return ()
        case "generate":
            return generate.OUTPUTS
        case "score":
            return None
        case "call":
            return tuple(p.name for p in function.outputs) if function else None


def output_types(draft: NodeDraft, bound: Bindings) -> dict[str, ValueType] | None:
    """The types of a node's outputs when its inputs are bound; None when options leave sizes open."""
    match draft.op:
        case "data":
            return data.outputs(draft)
        case "generate":
            return generate.outputs(draft, bound)
        case "score":
            return score.outputs(draft, bound)
        case "train" | "repeat":
            return {}
        case "call":
            assert draft.signature
            return {p.name: bound.made(p) for p in draft.signature.outputs}
