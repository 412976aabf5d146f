"""`train`: optimizer steps (AdamW, arXiv:1711.05101) on a typed per-token loss."""

from __future__ import annotations

from hflow.graph.options import Option
from hflow.graph.signature import Port, Signature
from hflow.graph.types import Dim, Factor, ValueType

OPTIONS = (
    Option("lr", "float", least=0),
    Option("betas", "floats", [0.9, 0.999], least=0, below=1, length=2),
    Option("eps", "float", 1e-8, above=0),
    Option("weight_decay", "float", 0.0, least=0),
    Option("clip_grad", "float", 1.0, least=0),  # 0: no clipping
    Option("warmup_steps", "int", 0, least=0),
    Option("aggregate", "str", "token_mean", choices=("token_mean", "sequence_mean", "sequence_sum")),
    Option("temperature", "float", 1.0, above=0),
)
COMPUTED = ("logprobs", "entropy")  # what a train node computes with the model that it trains
_LOSS_FORM = "`loss: f32[rows, resp~]` and further outputs of that type"


def inputs(loss: Signature) -> tuple[Port, ...]:
    """The ports of a train node: its tokens and mask, and what the loss reads over edges."""
    rows = loss.outputs[0].type.dims[0]
    tokens = Port("tokens", ValueType("i32", (rows, _ragged("seq"))))
    mask = Port("mask", ValueType("bool", (rows, _ragged("resp"))))
    read = tuple(p for p in loss.inputs if p.tag != "trained" and p.name != "mask")
    return (tokens, mask, *read)


def loss_problem(loss: Signature) -> str | None:
    """Why a function cannot be a loss, or None."""
    first = loss.outputs[0]
    rows = first.type.dims[0]
    per_row, per_token = (rows,), (rows, _ragged("resp"))
    if first.name != "loss" or len(rows.factors) != 1 or first.type != ValueType("f32", per_token):
        return f"a loss returns {_LOSS_FORM}, not `{first}`"
    for port in loss.outputs:
        if port.type != first.type:
            return f"a loss returns {_LOSS_FORM}, not `{port}`"
    for port in loss.inputs:
        if port.tag == "trained" and (port.name not in COMPUTED or port.type != first.type):
            return f"`{port}`: a train node computes {' and '.join(COMPUTED)}, as `{first.type}`"
        if port.type.dims not in (per_row, per_token) or port.type.dtype == "str":
            return f"`{port}`: a loss reads numbers per row or per response token of the rows that it returns"
        if port.name == "mask" and (port.type.dtype != "bool" or port.type.dims != per_token):
            return f"`{port}`: the mask of a loss is `bool[{rows}, resp~]`"
    return None


def _ragged(name: str) -> Dim:
    return Dim((Factor(name),), ragged=True)
