"""From the checked shape of a file to drafts: options, models, functions and references of each node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hflow.diagnostics import did_you_mean
from hflow.graph.infer import kinds
from hflow.graph.infer.bases import shared_bases
from hflow.graph.infer.draft import KEEP, CarriedInput, NodeDraft
from hflow.graph.infer.functions import FunctionSource
from hflow.graph.infer.functions_at import filters_at, function_at
from hflow.graph.infer.kinds import call, data, generate, score, train
from hflow.graph.infer.stated_lengths import stated_lengths
from hflow.graph.ir import Function, Head, ModelUse, Ref, Repeat
from hflow.graph.options import REQUIRED, Option, OptionProblem, defaults, problems
from hflow.graph.row_sources import SUCCESS, success_curriculum, with_filters
from hflow.graph.source import schema
from hflow.graph.source.document import Document, KeyPath
from hflow.graph.source.problems import Problems
from hflow.graph.types import ValueType, parse_type


def draft_nodes(spec: schema.GraphSpec, document: Document, found: Problems) -> dict[str, NodeDraft]:
    """A draft of every node of `spec`, in file order, those of a region before the region's own; problems go
    to `found`."""
    drafter = _Drafter(spec, document, found)
    drafts: dict[str, NodeDraft] = {}
    for name, node in spec.nodes.items():
        for drafted in drafter.draft(name, node):
            if drafted.name in drafts:
                message = f"another node is called `{drafted.name}`"
                found.add("HF224", message, drafted.path, key=True, help="names are unique in a file")
            drafts.setdefault(drafted.name, drafted)
    return drafts


def node_names(document: Document) -> tuple[str, ...]:
    """All nodes of the file, those in regions too, whether they are right or not."""
    outer = document.keys(("nodes",))
    return (*outer, *(inner for name in outer for inner in document.keys(("nodes", name, "nodes"))))


class _Drafter:
    def __init__(self, spec: schema.GraphSpec, document: Document, found: Problems):
        self.spec = spec
        self.document = document
        self.found = found
        self.models = document.keys(("models",))
        self.bases = shared_bases(spec)
        self.nodes = node_names(document)

    def draft(self, name: str, node: schema.NodeSpec) -> list[NodeDraft]:
        if not isinstance(node, schema.RepeatNodeSpec):
            return [self._node(self._bare(name, node, self.spec.loop.name, ("nodes", name)), node)]
        inner = {n: ("nodes", name, "nodes", n) for n in node.nodes}
        drafts = [self._node(self._bare(n, node.nodes[n], name, inner[n]), node.nodes[n]) for n in inner]
        for drafted in drafts:
            self._check_inner(drafted)
        return [*drafts, self._region(name, node)]

    def _node(self, bare: NodeDraft, node: schema.InnerNodeSpec) -> NodeDraft:
        match node:
            case schema.DataSpec():
                return self._data(bare, node)
            case schema.GenerateSpec():
                drafted = self._using(bare, node.model)
                if drafted.head == "scalar":
                    self._wrong_head(drafted, "generates with", "`head: lm`, which predicts tokens")
                    drafted = replace(drafted, head=None)
                wired = set(node.in_)
                drafted = replace(drafted, inputs=generate.inputs(wired, node.with_))
                drafted = self._reading(drafted, node, generate.options(wired), node.with_)
                self._report(bare.path, generate.option_problems(node.with_, generate.continues(wired)))
                made = generate.ports(wired, drafted.options)
                drafted = replace(drafted, outputs=made, declared=self._types(bare, node.out))
                greatest = drafted.options.get("max_new_tokens")
                return replace(drafted, lengths=stated_lengths(node.lengths, drafted, greatest, self.found))
            case schema.ScoreSpec():
                drafted = self._using(bare, node.model)
                outputs = score.output_ports(drafted.head) if drafted.head else None
                drafted = replace(drafted, inputs=score.inputs(drafted.head), outputs=outputs)
                drafted = self._reading(drafted, node, score.OPTIONS, node.with_)
                self._report(bare.path, score.option_problems(drafted.head, node.with_))
                return replace(drafted, declared=self._types(bare, node.out))
            case schema.TrainSpec():
                return self._train(bare, node)
            case schema.CallSpec():
                return self._call(bare, node)

    def _bare(
        self, name: str, node: schema.InnerNodeSpec | schema.RepeatNodeSpec, region: str, place: KeyPath
    ) -> NodeDraft:
        written = () if isinstance(node, schema.RepeatNodeSpec) else node.with_
        return NodeDraft(
            name,
            node.op,
            inputs=kinds.input_ports(node.op, None),
            outputs=kinds.output_ports(node.op, None),
            written=frozenset(written),
            after=tuple(node.after),
            region=region,
            place=place,
            span=self.document.span(place, key=True),
        )

    def _region(self, name: str, node: schema.RepeatNodeSpec) -> NodeDraft:
        bare = self._bare(name, node, self.spec.loop.name, ("nodes", name))
        if name == self.spec.loop.name:
            help_ = "give the region another name"
            message = f"the region is called like the step loop, `{name}`"
            self.found.add("HF224", message, bare.path, key=True, help=help_)
        sources = {KEEP: Ref(*node.until.keep.split("."))}
        for port, text in node.out.items():
            if port == KEEP:
                help_ = "give the output another name"
                message = "`keep` is what `until` reads, and cannot be an output too"
                self.found.add("HF224", message, (*bare.path, "out", port), key=True, help=help_)
            sources.setdefault(port, Ref(*text.split(".")))
        drafted = replace(
            bare,
            outputs=tuple(node.out),
            sources=sources,
            options={
                "rows": node.until.rows,
                "times": node.times,
                "short": node.short,
                "max_age": node.until.max_age,
            },
        )
        spans = {port: self.document.span(drafted.input_path(port)) for port in sources}
        return replace(drafted, input_spans=spans)

    def _check_inner(self, drafted: NodeDraft) -> None:
        if drafted.op == "train":
            help_ = "train after the region, on what it hands out"
            self.found.add(
                "HF224", f"`{drafted.name}` trains in a region", drafted.path, key=True, help=help_
            )
        for port in drafted.carried:
            message = f"`{port}` is carried from step to step, and the rounds of a region are no steps"
            self.found.add("HF225", message, drafted.input_path(port))
        if drafted.after:
            message = "`after` orders nodes of the step loop, not of a region"
            self.found.add("HF224", message, (*drafted.path, "after"), key=True)

    def _data(self, bare: NodeDraft, node: schema.DataSpec) -> NodeDraft:
        declared = self._types(bare, node.out)
        responses = data.num_responses(node.with_)
        columns = {port: t for port, t in declared.items() if self._is_column(bare, port, t, responses)}
        one_name = self._check_one_row_dim(bare, columns)
        if len(columns) == len(node.out):  # else a column is missing only because its type is wrong
            self._report(bare.path, data.option_problems(columns, node.with_))
        options = self._options(bare.path, data.OPTIONS, node.with_)
        tokenized = any(t.ragged for t in columns.values())
        options["tokenizer"] = self._tokenizer(bare, options.get("tokenizer")) if tokenized else None
        filters = filters_at((*bare.path, "with"), node.with_, self.found)
        if any(data.row_problems(node.with_)):
            options.pop("dataset", None)  # so that nobody reads what is wrong in it
        else:
            options = with_filters(options, filters)
        longest = options.get("max_prompt_tokens") if tokenized else None
        lengths = stated_lengths(node.lengths, bare, longest, self.found)
        drafted = replace(self._fed_back(bare, node.with_), lengths=lengths)
        if node.lengths and not tokenized and len(columns) == len(node.out):
            message = f"`lengths` of `{bare.name}` has no effect: no column has tokens"
            self.found.add("HF231", message, (*bare.path, "lengths"), key=True)
        return replace(
            drafted, outputs=tuple(node.out), declared=columns if one_name else {}, options=options
        )

    def _fed_back(self, bare: NodeDraft, written: Mapping[str, Any]) -> NodeDraft:
        """With the value of earlier steps by which rows are drawn."""
        if any(p.within == ("curriculum",) for p in data.row_problems(written)):
            return bare
        if (found := success_curriculum(written)) is None:
            return bare
        source = Ref(*found.success.split("."))
        spans = {SUCCESS: self.document.span(bare.input_path(SUCCESS))}
        carried = {SUCCESS: CarriedInput(found.lag)}
        return replace(
            bare, inputs=data.FEEDBACK, sources={SUCCESS: source}, carried=carried, input_spans=spans
        )

    def _check_one_row_dim(self, bare: NodeDraft, columns: Mapping[str, ValueType]) -> bool:
        factors = [t.dims[0].factors for t in columns.values()]
        for place in range(max(map(len, factors), default=0)):
            names = {f[place].name for f in factors if len(f) > place}
            if len(names) > 1:
                message = f"rows of one data node have one name, not {' and '.join(sorted(names))}"
                self.found.add("HF206", message, (*bare.path, "out"))
                return False
        return True

    def _is_column(self, bare: NodeDraft, port: str, type_: ValueType, responses: int | None) -> bool:
        message = data.column_problem(type_, responses)
        if message:
            self.found.add("HF206", message, (*bare.path, "out", port))
        return message is None

    def _tokenizer(self, bare: NodeDraft, written: str | None) -> str | None:
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

    def _train(self, bare: NodeDraft, node: schema.TrainSpec) -> NodeDraft:
        used = self._using(bare, schema.UseSpec(use=node.model, lag=0))
        source = self._function(bare, ("loss",), node.loss)
        if source and (problem := train.loss_problem(source)):
            self.found.add("HF206", f"`{node.loss}`: {problem}", (*bare.path, "loss"))
            source = None
        drafted = with_function(used, source)
        if source and used.head and (computed := train.missing_head(source.signature, used.head)):
            self._wrong_head(drafted, f"computes `{computed}` for its loss with", train.HEAD_TEXT[computed])
        if source:
            self._report(bare.path, train.option_problems(source.signature, used.head, node.with_))
        options = (*train.OPTIONS, *source.options) if source else None
        drafted = self._reading(drafted, node, options, node.with_)
        return replace(drafted, repeat=Repeat(node.repeat.epochs, node.repeat.minibatch or 0))

    def _call(self, bare: NodeDraft, node: schema.CallSpec) -> NodeDraft:
        source = self._function(bare, ("fn",), node.fn)
        if source and (problem := call.function_problem(source)):
            self.found.add("HF206", f"`{node.fn}`: {problem}", (*bare.path, "fn"))
            source = None
        options = (*call.OPTIONS, *source.options) if source else None
        drafted = self._reading(with_function(bare, source), node, options, node.with_)
        return replace(drafted, declared=self._types(bare, node.out))

    def _reading(
        self,
        bare: NodeDraft,
        node: schema.GenerateSpec | schema.ScoreSpec | schema.TrainSpec | schema.CallSpec,
        options: tuple[Option, ...] | None,
        written: Mapping[str, Any],
    ) -> NodeDraft:
        """`bare` with its references and its options; `options` is None where they are not known."""
        sources = {port: Ref(*spec.from_.split(".")) for port, spec in node.in_.items()}
        carried = {p: CarriedInput(s.lag, s.init) for p, s in node.in_.items() if s.lag}
        for port, spec in node.in_.items():
            self._check_carried(bare, port, spec)
        spans = {port: self.document.span(self._source_path(bare, port)) for port in sources}
        ports = [p.name for p in bare.inputs or ()]
        checked = self._options(bare.path, options, written, ports) if options is not None else {}
        return replace(bare, sources=sources, carried=carried, input_spans=spans, options=checked)

    def _source_path(self, bare: NodeDraft, port: str) -> KeyPath:
        return (*bare.input_path(port), "from")

    def _check_carried(self, bare: NodeDraft, port: str, spec: schema.SourceSpec) -> None:
        path = bare.input_path(port)
        if spec.lag and spec.init is None:
            message = f"`{port}` reads the value of an earlier step, and the first step has none before it"
            self.found.add("HF225", message, path, key=True, help="add `init`, the number it starts with")
        if spec.init is not None and not spec.lag:
            message = "`init` has no effect without `lag`"
            self.found.add("HF225", message, (*path, "init"), help="add `lag: 1`")

    def _using(self, drafted: NodeDraft, use: schema.UseSpec) -> NodeDraft:
        if use.use not in self.models:
            help_ = did_you_mean(use.use, self.models, "models")
            path = (*drafted.path, "model", "use")
            self.found.add("HF202", f"unknown model `{use.use}`", path, help=help_)
        model = self.spec.models.get(use.use)
        head: Head | None = model.head if model else None
        if of := self.bases.get(use.use):
            used = ModelUse(of, use.lag, base=True, delta_weights=use.delta_weights)
            return replace(drafted, model=used, head=head)
        used = ModelUse(use.use, use.lag, use.base, use.delta_weights)
        return replace(drafted, model=used, head=head)

    def _wrong_head(self, drafted: NodeDraft, does: str, needs: str) -> None:
        assert drafted.model
        message = f"`{drafted.name}` {does} `{drafted.model.model}`, which has `head: {drafted.head}`"
        self.found.add("HF222", message, (*drafted.path, "model"), help=f"that takes {needs}")

    def _function(self, bare: NodeDraft, key: KeyPath, reference: str) -> FunctionSource | None:
        return function_at((*bare.path, *key), reference, self.found)

    def _types(self, bare: NodeDraft, out: Mapping[str, str]) -> dict[str, ValueType]:
        types: dict[str, ValueType] = {}
        for port, text in out.items():
            try:
                types[port] = parse_type(text)
            except ValueError as error:
                self.found.add("HF206", str(error), (*bare.path, "out", port))
        return types

    def _options(
        self,
        path: KeyPath,
        options: tuple[Option, ...],
        written: Mapping[str, Any],
        ports: Sequence[str] = (),
    ) -> dict[str, Any]:
        self._report(path, (self._told_apart(p, written, ports) for p in problems(options, written)))
        return defaults(options, written)

    def _told_apart(
        self, problem: OptionProblem, written: Mapping[str, Any], ports: Sequence[str]
    ) -> OptionProblem:
        """Better help for an unknown option that is an input, or is given the name of a value."""
        value = str(written.get(problem.option or ""))
        names_a_value = "." in value and value.partition(".")[0] in self.nodes
        if problem.code != "HF211" or not (problem.option in ports or names_a_value):
            return problem
        what = f"`{problem.option}` is an input" if problem.option in ports else f"`{value}` names a value"
        help_ = f"{what}: write it under `in`; in Python, give an output of a node, not a text"
        return replace(problem, help=help_)

    def _report(self, path: KeyPath, problems_: Iterable[OptionProblem]) -> None:
        for p in problems_:
            place = (*path, "with", *p.within, *([p.option] if p.option else ()))
            is_unknown = p.code == "HF211" and not p.within
            help_ = self.found.with_removal(p.help, place) if is_unknown else p.help
            self.found.add(p.code, p.message, place, key=p.code != "HF212", help=help_)


def with_function(bare: NodeDraft, source: FunctionSource | None) -> NodeDraft:
    """`bare` with what the signature says; without one where the function could not be read."""
    if source is None:
        return bare
    function = Function(
        source.reference,
        str(source.signature),
        {o.name: None if o.default is REQUIRED else o.default for o in source.options},
        tuple(p.name for p in source.signature.inputs if p.tag == "trained"),
        source.whole_batch,
        source.min_group,
        source.needs,
    )
    return replace(
        bare,
        function=function,
        signature=source.signature,
        inputs=kinds.input_ports(bare.op, source.signature),
        outputs=kinds.output_ports(bare.op, source.signature),
    )
