"""The section `evaluations`: what each measures, with which rows and samples, and whether it can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from hflow.diagnostics import did_you_mean
from hflow.graph.checks.checks import ancestors, check_held_out, check_kept_apart
from hflow.graph.checks.typed import typed_nodes
from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.evaluated import ANSWERS, EvaluationProblems, MetricDraft, evaluated_drafts
from hflow.graph.infer.evaluated_options import OwnRows, sampling_options, sampling_problems
from hflow.graph.infer.functions import FunctionSource
from hflow.graph.infer.functions_at import filters_at, function_at
from hflow.graph.infer.kinds import data, generate
from hflow.graph.ir import EvaluationMetric, MetricKind, NamedEvaluation, Node, Ref, metric_key
from hflow.graph.options import REQUIRED, Option, OptionProblem
from hflow.graph.options import problems as option_problems
from hflow.graph.row_sources import with_filters
from hflow.graph.source.document import KeyPath
from hflow.graph.source.problems import Problems
from hflow.graph.source.schema import GraphSpec, MetricSpec, NamedEvaluationSpec

KINDS: Mapping[MetricKind, tuple[str, ...]] = {  # and the options of each
    "mean": (),
    "pass": ("k", "threshold"),
    "majority": ("k", "threshold", "correct", "by"),
    "length": (),
    "finished": (),
}
SHORT = "eval"  # the section of one evaluation, which goes by this name
THRESHOLD = 1.0
_SET = {
    "batch": "rows",
    "holdout": "rows",
    "shuffle": None,
    "curriculum": None,
}  # by the evaluation itself; what to write instead


def check_evaluations(
    spec: GraphSpec,
    drafts: Mapping[str, NodeDraft],
    nodes: Mapping[str, Node],
    declared: tuple[str, ...],
    problems: Problems,
) -> tuple[NamedEvaluation, ...]:
    """The evaluations of a file, those that are right.

    HF220 a bad evaluation, HF201 a value that does not exist, HF211 and HF212 options that `data`, `sampling`
    or a metric cannot have; HF206, HF208 and HF209 as in nodes, of values that a metric cannot be made of.
    `declared` names all nodes of the file, those with errors too.
    """
    if spec.eval and SHORT in spec.evaluations:
        message = f"the section `{SHORT}` is an evaluation of this name already"
        problems.add("HF220", message, ("evaluations", SHORT), key=True, help="give it another name")
    checks = (
        _Check(name, own, spec, drafts, nodes, declared, problems) for name, own in spec.evaluations.items()
    )
    return tuple(found for check in checks if (found := check.evaluation()))


@dataclass(frozen=True)
class _Check:
    name: str
    own: NamedEvaluationSpec
    spec: GraphSpec
    drafts: Mapping[str, NodeDraft]
    nodes: Mapping[str, Node]
    declared: tuple[str, ...]
    problems: Problems

    @property
    def path(self) -> KeyPath:
        return "evaluations", self.name

    def evaluation(self) -> NamedEvaluation | None:
        """None where something is wrong with it, or with what it depends on."""
        before = len(self.problems.found)
        if not self.own.every and not self.own.at:
            help_ = "say when: `every: 10`, or `at: [end]`"
            self._refuse("it never runs", "at", help_)
        drafted = [m for name, metric in self.own.metrics.items() if (m := self._metric(name, metric))]
        if len(drafted) < len(self.own.metrics) or len(self.problems.found) > before:
            return None
        read = {ref.partition(".")[0] for each in drafted for ref in _refs(each.metric)}
        names = {name for node in read for name in ancestors(self.nodes, node)}
        options = self._options(names)
        if len(self.problems.found) > before:
            return None
        loop = self.spec.loop.name
        own = evaluated_drafts(self.name, self.drafts, names, options, drafted, loop, self.problems)
        typed = tuple(typed_nodes(own, EvaluationProblems(self.name, self.problems)).values())
        if len(self.problems.found) == before:
            self._check_samples(drafted, typed)
        metrics = tuple(each.metric for each in drafted)
        return NamedEvaluation(
            self.name, self.own.rows, metrics, typed, self.own.every, tuple(dict.fromkeys(self.own.at)),
            dict(self.own.data), dict(self.own.sampling),
        )  # fmt: skip

    def _refuse(self, message: str, key: str, help_: str = "") -> None:
        self.problems.add("HF220", f"evaluation `{self.name}`: {message}", (*self.path, key), help=help_)

    def _metric(self, name: str, spec: MetricSpec) -> MetricDraft | None:
        """None where its values are wrong, or their nodes."""
        path = (*self.path, "metrics", name)
        said = {key: value for key, value in spec.model_dump(by_alias=True).items() if value is not None}
        kinds: list[MetricKind] = [kind for kind in KINDS if kind in said]
        if len(kinds) != 1:
            told = " and ".join(f"`{kind}`" for kind in kinds) or "none"
            message = f"metric `{name}` is of one kind, and says {told}"
            self.problems.add("HF220", message, path, help=f"kinds: {', '.join(KINDS)}")
            return None
        kind = kinds[0]
        options = {key: said[key] for key in said if key != kind}
        if not self._has_its_options(kind, options, path):
            return None
        if KINDS[kind]:
            options = {"k": 1, "threshold": THRESHOLD, **options}
        metric = EvaluationMetric(name, kind, said[kind], options)
        if kind in ("length", "finished"):
            return MetricDraft(metric, path) if self._is_generated(metric, path) else None
        refs: dict[str, str] = {kind: said[kind]}
        refs |= {"correct": said["correct"]} if kind == "majority" else {}
        found = [self._is_value(ref, (*path, key)) for key, ref in refs.items()]  # each is told
        if not all(found):
            return None
        return self._majority(metric, path) if kind == "majority" else MetricDraft(metric, path)

    def _has_its_options(self, kind: MetricKind, options: Mapping[str, Any], path: KeyPath) -> bool:
        for name in (name for name in options if name not in KINDS[kind]):
            message = f"`{name}` is no option of a metric `{kind}`"
            self.problems.add("HF211", message, (*path, name), key=True)
        missing = [name for name in ("k", "correct") if kind == "majority" and name not in options]
        for name in missing:
            example = {"k": "how many samples vote: `k: 4`", "correct": "which are right: `reward.score`"}
            self.problems.add("HF101", f"missing key `{name}`", path, key=True, help=example[name])
        return not missing and set(options) <= set(KINDS[kind])

    def _is_generated(self, metric: EvaluationMetric, path: KeyPath) -> bool:
        draft, place = self.drafts.get(metric.source), (*path, metric.kind)
        if metric.source not in self.declared:
            help_ = did_you_mean(metric.source, self.declared, "nodes")
            self.problems.add("HF201", f"no node `{metric.source}`", place, help=help_)
        elif draft and draft.op != "generate":
            message = f"`{metric.kind}` is that of the responses of a generate node, not of `{draft.name}`"
            self.problems.add("HF220", message, place)
        return draft is not None and draft.op == "generate" and metric.source in self.nodes

    def _is_value(self, text: str, path: KeyPath) -> bool:
        """Whether a value is there, and can be evaluated."""
        ref = Ref(*text.split("."))
        draft, node = self.drafts.get(ref.node), self.nodes.get(ref.node)
        unknown = draft is not None and draft.outputs is not None and ref.port not in draft.outputs
        if unknown or ref.node not in self.declared:
            refs = [str(Ref(d.name, port)) for d in self.drafts.values() for port in d.outputs or ()]
            help_ = did_you_mean(text, refs, "values")
            self.problems.add("HF201", f"no node produces `{text}`", path, help=help_)
            return False
        output = node.output(ref.port) if node else None
        if output is None:  # its node has an error
            return False
        if regions := [n for n in sorted(ancestors(self.nodes, ref.node)) if self.nodes[n].op == "repeat"]:
            message = f"`{ref}` depends on the region `{regions[0]}`, and evaluation runs no rounds"
            help_ = "measure a value that is made inside the region"
            self.problems.add("HF220", message, path, help=help_)
            return False
        type_ = output.type
        if path[-1] == "mean" and (type_.dtype != "f32" or len(type_.dims) != 1 or self._is_data(ref.node)):
            self.problems.add("HF220", f"a metric is `f32[rows]`, but `{ref}` is `{type_}`", path)
            return False
        return True

    def _is_data(self, node: str) -> bool:
        return self.nodes[node].op == "data"

    def _majority(self, metric: EvaluationMetric, path: KeyPath) -> MetricDraft | None:
        """With the function that finds answers, where one does."""
        node, _, port = metric.source.partition(".")
        dtype, answer = self.nodes[node].type_of(port).dtype, None
        if (by := metric.options.get("by")) is not None:
            answer = self._answer(by, (*path, "by"))
            if answer is None:
                return None
            metric = replace(metric, options={**metric.options, "by": answer.reference})
            dtype = answer.signature.outputs[0].type.dtype
        if dtype not in ANSWERS:
            message = f"the majority is that of texts or whole numbers ({', '.join(ANSWERS)}), not of {dtype}"
            help_ = (
                "" if answer else "a function that makes an answer of each sample: `by: ./file.py:function`"
            )
            self.problems.add("HF220", message, (*path, "by" if answer else "majority"), help=help_)
            return None
        return MetricDraft(metric, path, answer, dtype)

    def _answer(self, reference: str, path: KeyPath) -> FunctionSource | None:
        found = function_at(path, reference, self.problems)
        if found is None:
            return None
        asks = [o.name for o in found.options if o.default is REQUIRED]
        if len(found.signature.inputs) != 1 or len(found.signature.outputs) != 1 or asks:
            message = f"`{reference}` makes one value of one, without options that must be given"
            self.problems.add("HF206", message, path, help="like `text: str[rows] -> answer: str[rows]`")
            return None
        return found

    def _options(self, names: set[str]) -> dict[str, dict[str, Any]]:
        """Of the data and generate nodes among `names`, those that the evaluation sets."""
        sources = [self.drafts[name] for name in self.drafts if name in names and self._is_data(name)]
        samplers = [self.drafts[name] for name in self.drafts if name in names]
        samplers = [draft for draft in samplers if draft.op == "generate"]
        is_own = self._check_data(sources)
        if not is_own:
            check_held_out(self.own.rows, names, self.nodes, (*self.path, "rows"), self.problems)
            check_kept_apart(self.own.rows, names, self.nodes, self.drafts, self.problems)
        self._check_sampling(samplers)
        alone: dict[str, Any] = {"holdout": 0, "shuffle": False} if is_own else {}
        rows = {"batch": self.own.rows, **alone}
        found = {d.name: {**(self._own_rows(d) if is_own else d.options), **rows} for d in sources}
        return found | {d.name: sampling_options(d, self.own.sampling) for d in samplers}

    def _own_rows(self, draft: NodeDraft) -> dict[str, Any]:
        filters = filters_at((*self.path, "data"), self.own.data, self.problems)
        return with_filters(OwnRows(draft, self.own.data).options, filters)

    def _check_data(self, sources: Sequence[NodeDraft]) -> bool:
        """Whether the evaluation has rows of its own."""
        said, path = self.own.data, (*self.path, "data")
        if not said:
            return False
        if len(sources) != 1:
            named = " and ".join(f"`{draft.name}`" for draft in sources) or "none"
            self._refuse(f"`data` is about the data node behind its metrics, and there is {named}", "data")
            return False
        for name in (name for name in said if name in _SET):
            help_ = f"write `{_SET[name]}` beside `data`" if _SET[name] else ""
            message = f"`{name}` has no effect in an evaluation"
            self.problems.add("HF212", message, (*path, name), key=True, help=help_)
        (draft,) = sources
        own = OwnRows(draft, said)
        wrong = self._report(data.OPTIONS, {n: v for n, v in said.items() if n not in own.taken_away}, path)
        for problem in own.problems():
            self._add(problem, path, said, wrong)
        if isinstance(model := said.get("tokenizer"), str) and model not in self.spec.models:
            help_ = did_you_mean(model, self.spec.models, "models")
            self.problems.add("HF202", f"unknown model `{model}`", (*path, "tokenizer"), help=help_)
        if not own.names_others:
            message = f"`data` names no other rows than those that `{draft.name}` trains on"
            help_ = "name another `dataset`; held-out rows are read as the step's are, and need no `data`"
            self._refuse(message, "data", help_)
        return True

    def _check_sampling(self, samplers: Sequence[NodeDraft]) -> None:
        said, path = self.own.sampling, (*self.path, "sampling")
        if said and not samplers:
            self._refuse("its metrics depend on no generate node", "sampling")
            return
        if "in_flight" in said:
            message = "`in_flight` has no effect in an evaluation: weights do not change meanwhile"
            self.problems.add("HF212", message, (*path, "in_flight"), key=True)
        known = {o.name: o for draft in samplers for o in generate.options(set(draft.sources))}
        wrong = self._report(tuple(known.values()), said, path)
        for problem in dict.fromkeys(p for draft in samplers for p in sampling_problems(draft, said)):
            self._add(problem, path, said, wrong)

    def _report(self, options: Sequence[Option], said: Mapping[str, Any], path: KeyPath) -> set[str]:
        """The options with wrong values, or that are none, which are told."""
        found = [p for p in option_problems(options, said) if p.option]  # what is missing is as in the step
        for problem in found:
            place = (*path, problem.option or "")
            self.problems.add(
                problem.code, problem.message, place, key=problem.code == "HF211", help=problem.help
            )
        return {str(problem.option) for problem in found}

    def _add(self, problem: OptionProblem, path: KeyPath, said: Mapping[str, Any], wrong: Set[str]) -> None:
        """At the option, or where the step says that one, at the section of the evaluation at `path`."""
        place = (*problem.within, *([problem.option] if problem.option else ()))
        if place and place[0] in wrong:
            return
        is_own = bool(place) and place[0] in said
        at, key = ((*path, *place), problem.code != "HF212") if is_own else (path, True)
        self.problems.add(problem.code, problem.message, at, key=key, help=problem.help)

    def _check_samples(self, drafted: Sequence[MetricDraft], typed: Sequence[Node]) -> None:
        """HF220: a metric draws more samples than a prompt has, or equal ones."""
        made = {node.name: node for node in typed}
        for each in drafted:
            node, k = made.get(metric_key(self.name, each.metric.name)), each.metric.options.get("k", 0)
            if node is None:
                continue
            rows, (prompts,) = node.type_of("score"), node.outputs[:1]
            samples = rows.rows // prompts.type.rows
            if k > samples:
                message = f"`{each.metric.name}` takes {k} samples of a prompt, and there are {samples}"
                help_ = f"let the evaluation draw more: `sampling: {{n: {k}}}`"
                self.problems.add("HF220", message, (*each.path, "k"), help=help_)
        for node in typed:
            if node.op == "generate" and node.options["temperature"] == 0 and node.options.get("n", 1) > 1:
                message = f"evaluation `{self.name}`: the {node.options['n']} samples of a prompt are equal"
                help_ = "a temperature above 0, or `n: 1`"
                place = (*self.path, "sampling" if self.own.sampling else "rows")
                self.problems.add("HF220", f"{message}, being greedy", place, help=help_)


def _refs(metric: EvaluationMetric) -> Iterator[str]:
    yield metric.source
    if metric.kind == "majority":
        yield metric.options["correct"]
