"""From the checked shape of a file to drafts: options, models, functions and references of each node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hflow.diagnostics import HflowError, did_you_mean
from hflow.graph import kinds, schema
from hflow.graph.draft import Draft
from hflow.graph.functions import FunctionSource, read_function
from hflow.graph.graph import Function, ModelUse, OpKind, Ref, Repeat
from hflow.graph.kinds import data, generate, score, train
from hflow.graph.options import REQUIRED, Option, OptionProblem, defaults, problems
from hflow.graph.problems import Problems
from hflow.graph.source import Document, KeyPath
from hflow.graph.types import ValueType, parse_type


def draft_nodes(spec: schema.GraphSpec, document: Document, found: Problems) -> dict[str, Draft]:
    """A draft of every node of `spec`, in file order; problems go to `found`."""
    drafter = _Drafter(spec, document, found)
    return {name: drafter.draft(name, node) for name, node in spec.nodes.items()}


class _Drafter:
    def __init__(self, spec: schema.GraphSpec, document: Document, found: Problems):
        self.spec = spec
        self.document = document
        self.found = found
        self.models = document.keys(("models",))

    def draft(self, name: str, node: schema.NodeSpec) -> Draft:
        written = node.with_
        bare = self._bare(name, node.op, written)
        match node:
            case schema.DataSpec():
                return self._data(bare, node)
            case schema.GenerateSpec():
                drafted = self._reading(bare, node, generate.OPTIONS, written)
                return replace(self._using(drafted, node.model), declared=self._types(name, node.out))
            case schema.ScoreSpec():
                drafted = self._reading(bare, node, score.OPTIONS, written)
                return replace(self._using(drafted, node.model), declared=self._types(name, node.out))
            case schema.TrainSpec():
                return self._train(bare, node)
            case schema.CallSpec():
                return self._call(bare, node)

    def _bare(self, name: str, op: OpKind, written: Mapping[str, Any]) -> Draft:
        return Draft(
            name,
            op,
            inputs=kinds.input_ports(op, None),
            outputs=kinds.output_ports(op, None),
            written=frozenset(written),
            region=self.spec.loop.name,
            span=self.document.span(("nodes", name), key=True),
        )

    def _data(self, bare: Draft, node: schema.DataSpec) -> Draft:
        declared = self._types(bare.name, node.out)
        columns = {port: t for port, t in declared.items() if self._is_column(bare, port, t)}
        one_name = self._check_one_row_dim(bare, columns)
        if len(columns) == len(node.out):  # else a column is missing only because its type is wrong
            self._report(bare.path, data.option_problems(columns, node.with_))
        options = self._options(bare.path, data.OPTIONS, node.with_)
        tokenized = any(t.ragged for t in columns.values())
        options["tokenizer"] = self._tokenizer(bare, options.get("tokenizer")) if tokenized else None
        return replace(bare, outputs=tuple(node.out), declared=columns if one_name else {}, options=options)

    def _check_one_row_dim(self, bare: Draft, columns: Mapping[str, ValueType]) -> bool:
        names = {t.dims[0].factors[0].name for t in columns.values()}
        if len(names) > 1:
            message = f"rows of one data node have one name, not {' and '.join(sorted(names))}"
            self.found.add("HF206", message, (*bare.path, "out"))
        return len(names) <= 1

    def _is_column(self, bare: Draft, port: str, type_: ValueType) -> bool:
        message = data.column_problem(type_)
        if message:
            self.found.add("HF206", message, (*bare.path, "out", port))
        return message is None

    def _tokenizer(self, bare: Draft, written: str | None) -> str | None:
        """The model whose tokenizer a data node uses: the one named, or any when all share a path."""
        if written is not None:
            if written not in self.models:
                path = (*bare.path, "with", "tokenizer")
                help_ = did_you_mean(written, self.models, "models")
                self.found.add("HF202", f"unknown model `{written}`", path, help=help_)
            return written
        usable = len(self.spec.models) == len(self.models)
        paths = {m.path for m in self.spec.models.values()}
        if usable and len(paths) != 1:
            reason = "models have different paths" if paths else "the file has no model"
            message, help_ = f"no tokenizer for `{bare.name}`: {reason}", "name a model as option `tokenizer`"
            self.found.add("HF221", message, bare.path, key=True, help=help_)
        return next(iter(self.spec.models), None)

    def _train(self, bare: Draft, node: schema.TrainSpec) -> Draft:
        source = self._function(bare, "loss", node.loss)
        problem = train.loss_problem(source.signature) if source else None
        if problem:
            self.found.add("HF206", f"`{node.loss}`: {problem}", (*bare.path, "loss"))
            source = None
        own = {o.name for o in train.OPTIONS}
        if source and (clash := sorted(own & {o.name for o in source.options})):
            message = f"`{node.loss}`: option `{clash[0]}` is one of the train node itself"
            self.found.add("HF206", message, (*bare.path, "loss"))
            source = None
        options = (*train.OPTIONS, *source.options) if source else None
        drafted = self._reading(_with_function(bare, source), node, options, node.with_)
        repeat = Repeat(node.repeat.epochs, node.repeat.minibatch or 0)
        return replace(self._using(drafted, schema.UseSpec(use=node.model, lag=0)), repeat=repeat)

    def _call(self, bare: Draft, node: schema.CallSpec) -> Draft:
        source = self._function(bare, "fn", node.fn)
        if source and any(p.tag == "trained" for p in source.signature.inputs):
            message = f"`{node.fn}`: only a train node computes `<trained>` inputs"
            self.found.add("HF206", message, (*bare.path, "fn"))
            source = None
        drafted = self._reading(
            _with_function(bare, source), node, source.options if source else None, node.with_
        )
        return replace(drafted, declared=self._types(bare.name, node.out))

    def _reading(
        self,
        bare: Draft,
        node: schema.GenerateSpec | schema.ScoreSpec | schema.TrainSpec | schema.CallSpec,
        options: tuple[Option, ...] | None,
        written: Mapping[str, Any],
    ) -> Draft:
        """`bare` with its references and its options; `options` is None where they are not known."""
        sources = {port: Ref(*text.split(".")) for port, text in node.in_.items()}
        spans = {port: self.document.span((*bare.path, "in", port)) for port in sources}
        checked = self._options(bare.path, options, written) if options is not None else {}
        return replace(bare, sources=sources, input_spans=spans, options=checked)

    def _using(self, drafted: Draft, use: schema.UseSpec) -> Draft:
        known = use.use in self.models
        if not known:
            help_ = did_you_mean(use.use, self.models, "models")
            path = (*drafted.path, "model", "use")
            self.found.add("HF202", f"unknown model `{use.use}`", path, help=help_)
        return replace(drafted, model=ModelUse(use.use, use.lag), known_model=known)

    def _function(self, bare: Draft, key: str, reference: str) -> FunctionSource | None:
        try:
            return read_function(reference, Path(self.document.file).parent)
        except HflowError as error:
            for problem in error.diagnostics:
                self.found.add(problem.code, problem.message, (*bare.path, key), help=problem.help)
            return None

    def _types(self, name: str, out: Mapping[str, str]) -> dict[str, ValueType]:
        types: dict[str, ValueType] = {}
        for port, text in out.items():
            try:
                types[port] = parse_type(text)
            except ValueError as error:
                self.found.add("HF206", str(error), ("nodes", name, "out", port))
        return types

    def _options(
        self, path: KeyPath, options: tuple[Option, ...], written: Mapping[str, Any]
    ) -> dict[str, Any]:
        self._report(path, problems(options, written))
        return defaults(options, written)

    def _report(self, path: KeyPath, problems_: Iterable[OptionProblem]) -> None:
        for p in problems_:
            place = (*path, "with", p.option) if p.option else (*path, "with")
            self.found.add(p.code, p.message, place, key=p.code != "HF212", help=p.help)


def _with_function(bare: Draft, source: FunctionSource | None) -> Draft:
    if source is None:
        return bare
    function = Function(
        source.reference,
        str(source.signature),
        {o.name: None if o.default is REQUIRED else o.default for o in source.options},
        tuple(p.name for p in source.signature.inputs if p.tag == "trained"),
    )
    return replace(
        bare,
        function=function,
        signature=source.signature,
        inputs=kinds.input_ports(bare.op, source.signature),
        outputs=kinds.output_ports(bare.op, source.signature),
    )
