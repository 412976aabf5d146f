"""Type inference: from drafts, in topological order, to typed nodes.

A node that reads a value without a type (its producer has an error) gets no type and reports nothing that
follows from it, so each mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hflow.diagnostics import did_you_mean
from hflow.graph.infer import kinds, regions
from hflow.graph.infer.draft import CarriedInput, NodeDraft
from hflow.graph.infer.inherited import inherited
from hflow.graph.infer.kinds import data, feedback, generate
from hflow.graph.infer.signature import Port
from hflow.graph.infer.unify import Argument, unify
from hflow.graph.infer.wiring import DERIVED
from hflow.graph.ir import Input, Node, Output, Ref, Repeat
from hflow.graph.source.problems import Problems
from hflow.graph.types import Dim, ValueType, group_size


def infer(drafts: Mapping[str, NodeDraft], order: Sequence[str], problems: Problems) -> dict[str, Node]:
    """The typed nodes, in `order`; those that cannot be typed are left out."""
    inference = _Inference(drafts, problems)
    for name in order:
        inference.add(drafts[name])
    inference.check_carried()
    return inference.nodes


TRIED = 10_000  # numbers below and above a minibatch, to find one that divides its rows
_SCALAR = ValueType("f32", ())  # what may be carried from step to step


class _Inference:
    def __init__(self, drafts: Mapping[str, NodeDraft], problems: Problems):
        self.drafts = drafts
        self.problems = problems
        self.types: dict[Ref, ValueType] = {}
        self.nodes: dict[str, Node] = {}
        self.read = {ref for draft in drafts.values() for ref in draft.sources.values()}

    def add(self, draft: NodeDraft) -> None:
        if draft.op == "repeat":
            self._add_region(draft)
            return
        if draft.inputs is None:
            return
        if draft.op == "data":
            self._add_data(draft)
            return
        if any(p.name in draft.carried and not p.type.scalar for p in draft.inputs):
            return  # reported by `wiring`
        known = {port.name for port in draft.inputs}
        sources = {port: ref for port, ref in draft.sources.items() if port in known}
        if mask := self._derived(draft, draft.inputs, sources):
            sources[DERIVED] = mask
        values = {p: Argument(self.types[r], str(r)) for p, r in sources.items() if self._has(draft, r)}
        values |= {p: Argument(_SCALAR, str(sources[p])) for p in draft.carried if p in sources}
        own = draft.model.model if draft.op in ("train", "generate") and draft.model else None
        critic = own if draft.op == "train" and draft.head == "scalar" else None
        mixes = draft.signature.mixes if draft.signature else False
        bound, mismatches = unify(draft.inputs, values, own, critic, mixes)
        for m in mismatches:
            self.problems.add(m.code, m.message, draft.input_path(m.port), help=m.help)
        complete = all(p.name in values or (p.optional and p.name not in sources) for p in draft.inputs)
        if mismatches or not complete or (draft.model and draft.head is None):
            return
        draft = replace(draft, options={**draft.options, **self._inherited(draft, sources)})
        types = kinds.output_types(draft, bound)
        if types is None:
            return
        types = {port: t for port, t in types.items() if self._is_made(draft, port)}
        self._check_declared(draft, types)
        self.types.update({Ref(draft.name, port): t for port, t in types.items()})
        self.nodes[draft.name] = self._node(draft, sources, types)

    def _add_data(self, draft: NodeDraft) -> None:
        """Without what it reads of earlier steps: `check_carried` adds that."""
        if (types := data.outputs(draft)) is None:
            return
        self.types.update({Ref(draft.name, port): t for port, t in types.items()})
        self.nodes[draft.name] = self._node(replace(draft, inputs=()), {}, types)

    def _inherited(self, draft: NodeDraft, sources: Mapping[str, Ref]) -> Mapping[str, Any]:
        """What a node that says nothing else takes over from the sampler of its texts."""
        origin = self._text_origin(sources["tokens"]) if "tokens" in sources else None
        sampler = self.nodes.get(regions.maker(origin)) if origin else None
        return inherited(draft, sampler) if sampler and sampler.op == "generate" else {}

    def _is_made(self, draft: NodeDraft, port: str) -> bool:
        """Whether a node makes a value that nobody may want."""
        optional = draft.op == "generate" and port in generate.WHERE_READ
        return not optional or Ref(draft.name, port) in self.read or port in draft.declared

    def _add_region(self, draft: NodeDraft) -> None:
        if not all(self._has(draft, ref) for ref in draft.sources.values()):
            return
        trained = {d.model.model for d in self.drafts.values() if d.op == "train" and d.model}
        types = regions.output_types(draft, self.types, trained, self.problems)
        if types is None:
            return
        self.types.update({Ref(draft.name, port): t for port, t in types.items()})
        self.nodes[draft.name] = self._node(draft, draft.sources, types)

    def _has(self, draft: NodeDraft, ref: Ref) -> bool:
        """Whether a value that a node names has a type, and is there for it."""
        return ref in self.types and regions.readable(draft, ref, self.drafts)

    def check_carried(self) -> None:
        """HF225: a value that is carried from step to step is no scalar; a data node reads its own rows."""
        for draft in self.drafts.values():
            if draft.op == "data" and draft.carried:
                self._feed_back(draft)
                continue
            for port in [p.name for p in draft.inputs or () if p.type.scalar and p.name in draft.carried]:
                type_ = self.types.get(draft.sources[port])
                if type_ and (type_.dtype, type_.dims) != (_SCALAR.dtype, _SCALAR.dims):
                    message = (
                        f"`{draft.sources[port]}` is `{type_}`; only `{_SCALAR}` is carried from step to step"
                    )
                    help_ = "a function with `whole_batch=True` makes a scalar of a batch"
                    self.problems.add("HF225", message, draft.input_path(port), help=help_)

    def _feed_back(self, draft: NodeDraft) -> None:
        """HF208, HF209, HF212: what a curriculum reads does not say of each row whether it was a success."""
        ((port, source),) = draft.sources.items()
        type_, node = self.types.get(source), self.nodes.get(draft.name)
        if type_ is None or node is None or not self._has(draft, source):
            return
        problem = feedback.problem(source, type_, node)
        if problem:
            self.problems.add(problem[0], problem[1], draft.input_path(port), help=problem[2])
            return
        self.nodes[draft.name] = replace(node, inputs=(self._input(draft, port, source),))

    def _node(self, draft: NodeDraft, sources: Mapping[str, Ref], types: Mapping[str, ValueType]) -> Node:
        ports = sources if draft.inputs is None else [p.name for p in draft.inputs if p.name in sources]
        node = Node(
            draft.name,
            draft.op,
            draft.model,
            draft.function,
            tuple(self._input(draft, port, sources[port]) for port in ports),
            tuple(Output(port, t) for port, t in types.items()),
            draft.options,
            after=draft.after,
            region=draft.region,
            span=draft.span,
            lengths=draft.lengths,
        )
        return replace(node, repeat=self._repeat(draft, draft.repeat, node)) if draft.repeat else node

    def _input(self, draft: NodeDraft, port: str, source: Ref) -> Input:
        carry = draft.carried.get(port, CarriedInput(0))
        return Input(
            port,
            source,
            _SCALAR if carry.lag and draft.op != "data" else self.types[source],
            lag=carry.lag,
            init=carry.init or 0.0,
            derived=port not in draft.sources,
            span=draft.input_spans.get(port),
        )

    def _repeat(self, draft: NodeDraft, written: Repeat, node: Node) -> Repeat:
        """`repeat` with its minibatch filled in: all rows, unless the file says otherwise."""
        size, group = written.minibatch or node.rows, self._loss_group(draft, node)
        path = (*draft.path, "repeat", "minibatch")
        if node.rows % size:
            message = f"minibatch {size} does not divide the {node.rows} rows of `{draft.name}`"
            self.problems.add("HF219", message, path, help=_that_fit(node.rows, size, group))
        elif size % group:
            message = (
                f"minibatch {size} splits the groups of {group} rows that the loss of `{draft.name}` compares"
            )
            self.problems.add("HF219", message, path, help=_that_fit(node.rows, size, group))
        return Repeat(written.epochs, size)

    def _loss_group(self, draft: NodeDraft, node: Node) -> int:
        """Rows that the loss takes together."""
        assert draft.signature
        rows, pattern = node.inputs[0].type.dims[0], draft.signature.inputs[0].type.dims[0]
        return group_size(rows, pattern)

    def _derived(self, draft: NodeDraft, inputs: Sequence[Port], sources: Mapping[str, Ref]) -> Ref | None:
        """Where the mask of a node comes from that does not name it: from the maker of its texts."""
        port = next((p for p in inputs if p.name == DERIVED), None)
        if port is None or DERIVED in sources:
            return None
        in_order = (sources[p.name] for p in inputs if p.name in sources)
        origin = next((o for ref in in_order if (o := self._text_origin(ref))), None)
        if origin is None:
            if not port.optional:
                self._check_mask_derivable(draft, inputs, sources)
            return None
        if found := regions.text_source(origin, DERIVED, self.drafts):
            return found
        if not port.optional:
            help_ = f"wire `{DERIVED}`, or let `{origin.partition('/')[0]}` produce `{DERIVED}`"
            message = f"`{draft.name}` lacks its input `{port}`"
            self.problems.add("HF207", message, draft.path, key=True, help=help_)
        return None

    def _check_mask_derivable(
        self, draft: NodeDraft, inputs: Sequence[Port], sources: Mapping[str, Ref]
    ) -> None:
        """Without any text among its inputs, a node must name its mask; silent after other errors."""
        required = {p.name for p in inputs if not p.optional} - {DERIVED}
        now = [ref for port, ref in sources.items() if port not in draft.carried]
        if required - sources.keys() or any(ref not in self.types for ref in now):
            return
        makers = [f"{name}.{DERIVED}" for name, other in self.drafts.items() if other.op == "generate"]
        wire = f"write `{DERIVED}: {makers[0]}`" if len(makers) == 1 else f"wire `{DERIVED}`"
        help_ = f"{wire}: no other input says which texts it belongs to"
        message = f"`{draft.name}` lacks its input `{DERIVED}`"
        self.problems.add("HF207", message, draft.path, key=True, help=help_)

    def _text_origin(self, ref: Ref) -> str | None:
        dims = self.types[ref].dims if ref in self.types else ()
        return next((d.factors[0].origin for d in dims if d.ragged and d.factors[0].name != "prompt"), None)

    def _check_declared(self, draft: NodeDraft, types: Mapping[str, ValueType]) -> None:
        for port, declared in draft.declared.items():
            path = (*draft.path, "out", port)
            if port not in types:
                help_ = did_you_mean(port, types, "outputs")
                message = f"`{draft.name}` has no output `{port}`"
                self.problems.add("HF213", message, path, key=True, help=help_)
            elif not _agrees(declared, types[port]):
                message = f"`{port}` is declared `{declared}`, but is `{types[port]}`"
                self.problems.add("HF213", message, path)


def _agrees(declared: ValueType, actual: ValueType) -> bool:
    """Dtype and names agree; sizes, origins and factors of size 1 need not be written."""
    if declared.dtype != actual.dtype or len(declared.dims) != len(actual.dims):
        return False
    return all(_same_names(d, a) for d, a in zip(declared.dims, actual.dims))


def _same_names(declared: Dim, actual: Dim) -> bool:
    names = [f.name for f in declared.factors]
    written = ([f.name for f in actual.factors], [f.name for f in actual.significant])
    return declared.ragged == actual.ragged and names in written


def _that_fit(rows: int, size: int, group: int) -> str:
    """The nearest minibatches below and above `size` that divide `rows` into whole groups."""
    whole, rest = divmod(rows, group)
    if rest:
        return ""
    at = min(size // group, whole)
    below = next((n for n in range(at, max(0, at - TRIED), -1) if whole % n == 0), None)
    above = next((n for n in range(at + 1, min(whole, at + TRIED) + 1) if whole % n == 0), None)
    near = " and ".join(str(group * n) for n in (below, above) if n)
    return f"the nearest that fit: {near}" if near else ""
