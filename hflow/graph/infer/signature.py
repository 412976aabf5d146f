"""Signatures of typed functions: ``name: type, name?: type<tag> -> name: type``.

``name?`` is an input that may be left out; a last dim ``resp~?`` one that the value may lack (one number
for the whole response). A tag says whose values an input wants:

- ``<trained>``: of the model being trained, computed by the train node itself;
- ``<behaviour>``: log-probs that the trained model sampled with;
- ``<old>``: log-probs of the trained model before this step's updates, sampled with or scored by it;
- ``<scored>``: log-probs from a forward pass of any model over given tokens;
- ``<value>``: estimates of a model with a scalar head; in a loss, of the trained one.

Numbers that a function makes from values belong to the model of these values (`derived`), so values of one
model only may enter, and what was made from them. ``<mixed>`` at an output says otherwise: it may be made
from values of several models, and belongs to none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from hflow.graph.types import CHOICE, RAGGED_DIMS, Dim, Factor, ValueType, parse_type

Tag = Literal["trained", "behaviour", "old", "scored", "value"]  # of an input
OutputTag = Literal["mixed"]
# Of inputs of score and train nodes (and `kept` of later turns); no function asks for them.
BuiltinTag = Literal["kept", "routes"]


@dataclass(frozen=True)
class Port:
    """One input or output. The names of its dims are variables, except those of ragged dims."""

    name: str
    type: ValueType
    tag: Tag | OutputTag | BuiltinTag | None = None
    optional: bool = False

    @property
    def numbers(self) -> bool:
        """Whether it has real numbers per row or per token, which can be estimates; a scalar is a statistic
        of the batch."""
        return bool(self.type.dims) and self.type.dtype in ("f32", "bf16")

    def __str__(self) -> str:
        mark, tag = "?" if self.optional else "", f"<{self.tag}>" if self.tag else ""
        return f"{self.name}{mark}: {self.type}{tag}"


@dataclass(frozen=True)
class Signature:
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def mixes(self) -> bool:
        """Whether values of several models may enter: nothing that it makes belongs to one of them."""
        return all(p.tag == "mixed" for p in self.outputs if p.numbers)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def kept_port(rows: Dim, optional: bool) -> Port:
    """The tokens among which a truncated sampler chose each token of the responses."""
    resp, kept = (Dim((Factor(name),), ragged=True) for name in ("resp", "kept"))
    return Port("kept", ValueType("i32", (rows, resp, kept)), "kept", optional)


def routes_port(rows: Dim) -> Port:
    """The experts through which each token of the sequences passes, layer by layer."""
    dims = rows, Dim((Factor("seq"),), ragged=True), Dim((Factor(CHOICE),))
    return Port("routes", ValueType("i16", dims), "routes", optional=True)


_PORT = re.compile(r"\s*([A-Za-z_]\w*)\s*(\?)?\s*:\s*(\w+\s*\[[^\]]*\])\s*(?:<(\w*)>)?\s*")


def parse_signature(text: str) -> Signature:
    """Read a signature.

    Raises:
        ValueError: with a message for the user, when the text is no signature or names an output
            dim that no required input has.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError("a signature has the form `name: type, ... -> name: type, ...`")
    signature = Signature(parse_ports(left), parse_ports(right))
    for port in signature.inputs:
        if port.tag == "mixed":
            raise ValueError(f"`{port.name}` is an input: `<mixed>` is said of outputs")
    for port in signature.outputs:
        _check_output(port)
    bound = _dim_names(p for p in signature.inputs if not p.optional)
    for port in signature.outputs:
        if free := _dim_names([port]) - bound:
            raise ValueError(f"dim `{min(free)}` of output `{port.name}` is a dim of no required input")
    return signature


def parse_ports(text: str) -> tuple[Port, ...]:
    """Read one side of a signature.

    Raises:
        ValueError: with a message for the user.
    """
    ports: list[Port] = []
    at = 0
    while True:
        match = _PORT.match(text, at)
        if not match:
            raise ValueError(f"expected `name: type` at `{text[at:].strip()}`")
        ports.append(_port(match))
        at = match.end()
        if at == len(text):
            break
        if text[at] != ",":
            raise ValueError(f"expected `,` at `{text[at:].strip()}`")
        at += 1
    names = [p.name for p in ports]
    if repeated := [n for n in names if names.count(n) > 1]:
        raise ValueError(f"`{repeated[0]}` occurs twice")
    return tuple(ports)


def _port(match: re.Match[str]) -> Port:
    name, mark, type_text, tag = match.groups()
    known = (*get_args(Tag), *get_args(OutputTag))
    if tag is not None and tag not in known:
        raise ValueError(f"unknown tag `<{tag}>`; tags: {', '.join(known)}")
    type_ = parse_type(type_text)
    if type_.dims and type_.dims[0].ragged:
        raise ValueError(f"`{name}`: the first dim of `{type_}` must be its rows, not ragged")
    for number, dim in enumerate(type_.dims):
        _check_names(dim)
        if dim.optional and (number == 0 or number < len(type_.dims) - 1):
            raise ValueError(f"`{name}`: only the last dim of `{type_}` may be optional, and not its rows")
    return Port(name, type_, cast("Tag | OutputTag | None", tag), mark is not None)


def _check_output(port: Port) -> None:
    if port.optional or any(d.optional for d in port.type.dims):
        raise ValueError(f"output `{port.name}` cannot have `?`")
    if port.tag not in (None, "mixed"):
        raise ValueError(
            f"output `{port.name}` has the tag `<{port.tag}>`: only `<mixed>` is said of outputs"
        )
    if port.tag and not port.numbers:
        raise ValueError(
            f"`<mixed>` has no effect at output `{port.name}`: `{port.type}` belongs to no model"
        )


def _check_names(dim: Dim) -> None:
    if len(set(dim.factors)) < len(dim.factors):
        raise ValueError(f"dim `{dim}` has one name twice")
    if dim.ragged and dim.factors[0].name not in RAGGED_DIMS:
        known = ", ".join(f"{n}~" for n in RAGGED_DIMS)
        raise ValueError(f"unknown ragged dim `{dim}`; ragged dims: {known}")


def _dim_names(ports: Iterable[Port]) -> set[str]:
    dims = [d for p in ports for d in p.type.dims if not d.optional]
    return {f.name + "~" * d.ragged for d in dims for f in d.factors}
