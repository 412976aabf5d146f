"""Which values of a step are kept as its samples, and which device has which rows of them.

A table has one row per text of one node: what it was asked, what it answered, and every number that the step
makes of that row. Values of a prompt stand beside each of its samples. What is made in a region is not
there, only what the region hands out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from hflow.graph.infer.regions import maker
from hflow.graph.ir import Graph, Node, Output, Ref
from hflow.graph.types import Dim, ValueType, same_rows
from hflow.plan.plan import Plan
from hflow.plan.ports import output_layout, row_unit

How = Literal["value", "mean", "sum"]
NUMBERS = ("f32", "bf16", "i32", "bool")
ADVANTAGES = "advantages"  # the input of a train node


@dataclass(frozen=True)
class SampleColumn:
    """One column of a table.

    Attributes:
        name: in the table.
        value: what is read.
        how: as it is; the mean over the tokens of a response; or their sum where the mask says so.
        repeats: so many rows of the table have one row of the value.
    """

    name: str
    value: Ref
    how: How = "value"
    repeats: int = 1


@dataclass(frozen=True)
class SampleTable:
    """The samples of one node: a `generate` or `data` node, or a region that hands texts out.

    Attributes:
        node: its name.
        rows: of one step.
        tokens: prompts and what follows them.
        mask: has a value per token of what follows; None where the node has none: then nobody knows where
            responses begin.
        tokenizer: the model whose tokenizer reads them.
        maker: the `generate` or `data` node that ended the texts.
        finish: why each response ended, where the node tells.
        data: the data node whose rows the prompts are, in the step itself; empty for rows of a region.
        data_repeats: so many rows of the table have one prompt.
        columns: all that is computed or read beside.
    """

    node: str
    rows: int
    tokens: Ref
    mask: Ref | None
    tokenizer: str
    maker: str
    finish: Ref | None
    data: str
    data_repeats: int
    columns: tuple[SampleColumn, ...]


def sample_tables(graph: Graph) -> tuple[SampleTable, ...]:
    """One for each node of the step loop whose texts are whole sequences, in node order; of several turns of
    one conversation the last, which has them all."""
    nodes = graph.inside(graph.regions[0].name)
    sources = [(node, output) for node in nodes for output in node.outputs if is_whole_text(output.type)]
    last = [s for n, s in enumerate(sources) if not any(_goes_on(s, later) for later in sources[n + 1 :])]
    return tuple(_table(graph, nodes, node, output) for node, output in last)


def is_whole_text(type_: ValueType) -> bool:
    """Whether a value holds whole sequences: prompts with what follows them."""
    last = type_.dims[-1] if type_.dims else None
    return type_.dtype == "i32" and last is not None and last.ragged and last.factors[0].name == "seq"


def sampled_rows(plan: Plan, value: Ref) -> Mapping[int, tuple[int, int]]:
    """The rows of a value of the step that each device hands over, so that each row is handed over once."""
    node = plan.graph.node(value.node)
    type_ = next(o.type for o in node.outputs if o.port == value.port)
    boxes = output_layout(node, plan.node(node.name).mesh, type_).boxes((type_.rows,))
    first: dict[tuple[int, int], int] = {}
    for device in sorted(boxes):
        first.setdefault(boxes[device][0], device)
    return {device: rows for rows, device in first.items()}


def data_rows(plan: Plan, node: str) -> Mapping[int, tuple[int, int]]:
    """As `sampled_rows`, of the rows of its dataset that a data node draws."""
    output = plan.graph.node(node).outputs[0]
    unit, found = row_unit(output.type), sampled_rows(plan, Ref(node, output.port))
    return {device: (start // unit, stop // unit) for device, (start, stop) in found.items()}


def _goes_on(source: tuple[Node, Output], later: tuple[Node, Output]) -> bool:
    """Whether `later` is a further turn of the same conversations."""
    (node, output), (next_node, next_output) = source, later
    if node.op == "data" or next_node.op != "generate" or not next_node.input("observation"):
        return False
    return same_rows(output.type.dims[0].factors, next_output.type.dims[0].factors)


def _table(graph: Graph, nodes: tuple[Node, ...], node: Node, tokens: Output) -> SampleTable:
    rows, text = tokens.type.dims[0], tokens.type.dims[-1].factors[0].origin
    of_text = [o for o in node.outputs if o.type.dims[0] == rows and _response(o.type) == text]
    mask = next((o for o in of_text if o.type.dtype == "bool"), None)
    finish = next((o for o in node.outputs if _made_as(node, o).port == "finish"), None)
    origin = rows.factors[0].origin or ""
    is_drawn = any(n.name == origin and n.op == "data" for n in nodes)
    found = tuple(_columns(graph, nodes, node, rows, text))
    return SampleTable(
        node.name,
        tokens.type.rows,
        Ref(node.name, tokens.port),
        Ref(node.name, mask.port) if mask else None,
        _tokenizer(graph, text or ""),
        maker(text or ""),
        Ref(node.name, finish.port) if finish and len(finish.type.dims) == 1 else None,
        origin if is_drawn else "",
        (rows.size or 1) // (rows.factors[0].size or 1),
        (*_named(graph, found), *found),
    )


def _columns(
    graph: Graph, nodes: tuple[Node, ...], source: Node, rows: Dim, text: str | None
) -> Iterator[SampleColumn]:
    for node in nodes:
        for output in node.outputs:
            repeats = _repeats(output.type, rows)
            how = _how(graph, node, output, text) if repeats else None
            if repeats is None or how is None or output.port == "finish" or (how == "sum" and node != source):
                continue
            value = Ref(node.name, output.port)
            yield SampleColumn("logprob" if how == "sum" else str(value), value, how, repeats)


def _how(graph: Graph, node: Node, output: Output, text: str | None) -> How | None:
    """What a value says of each row; None: nothing that is kept."""
    type_, made_by = output.type, _maker(graph, node, output)
    if len(type_.dims) == 1:
        is_text = type_.dtype == "str" and made_by.op in ("data", "call")
        is_number = type_.dtype in NUMBERS and made_by.op in ("call", "score")
        return "value" if is_text or is_number else None
    if type_.dtype != "f32" or _response(type_) != text:
        return None
    if type_.provenance and type_.provenance.role == "behaviour":
        return "sum"
    return "mean" if made_by.op == "call" else None


def _named(graph: Graph, columns: tuple[SampleColumn, ...]) -> Iterator[SampleColumn]:
    """The reward and the advantage once more, under these names."""
    reward = [c for c in columns if str(_inner(graph, c.value)) == graph.reward and c.how != "sum"]
    trained = [i.source for n in graph.nodes if n.op == "train" for i in n.inputs if i.port == ADVANTAGES]
    advantage = [c for c in columns if c.value in trained]
    for name, found in (("reward", reward), ("advantage", advantage)):
        if found:
            yield SampleColumn(name, found[0].value, found[0].how, found[0].repeats)


def _repeats(type_: ValueType, rows: Dim) -> int | None:
    """How many rows of the table have one of a value; None where they are other rows."""
    if not type_.dims or type_.dims[0].ragged:
        return None
    own = type_.dims[0]
    if same_rows(own.factors, rows.factors):
        return 1
    is_outer = own.factors == rows.factors[: len(own.factors)]
    return (rows.size or 1) // (own.size or 1) if is_outer else None


def _response(type_: ValueType) -> str | None:
    """The node whose responses' tokens a value tells of, one by one; of a region, as `REGION/NODE`."""
    last = type_.dims[-1] if len(type_.dims) == 2 else None
    is_response = last is not None and last.ragged and last.factors[0].name == "resp"
    return last.factors[0].origin if last and is_response else None


def _inner(graph: Graph, value: Ref) -> Ref:
    """The value that a region hands out, as its nodes call it; any other as it is."""
    node = graph.node(value.node)
    handed = node.input(value.port) if node.op == "repeat" else None
    return handed.source if handed else value


def _maker(graph: Graph, node: Node, output: Output) -> Node:
    return graph.node(_inner(graph, Ref(node.name, output.port)).node)


def _made_as(node: Node, output: Output) -> Ref:
    handed = node.input(output.port) if node.op == "repeat" else None
    return handed.source if handed else Ref(node.name, output.port)


def _tokenizer(graph: Graph, text: str) -> str:
    """The model whose tokenizer has cut the texts of a node."""
    node = graph.node(maker(text))
    return str(node.options["tokenizer"]) if node.op == "data" else node.model_use.model
