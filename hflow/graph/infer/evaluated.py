"""The nodes of a named evaluation: those of the step that its metrics depend on, typed once more with its own
options, and the calls that make the metrics.

Other options make other types (`n` the groups, `max_new_tokens` the lengths), so drafts are inferred again
under other names: ``rollout@test``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.drafting import with_function
from hflow.graph.infer.functions import FunctionSource, read_function
from hflow.graph.infer.kinds import generate
from hflow.graph.ir import EvaluationMetric, Ref, evaluated_node, metric_key
from hflow.graph.source.document import KeyPath
from hflow.graph.source.problems import Problems
from hflow.graph.types import DType

_PASS = "hflow.ops.evaluation.pass_at_k"
_MAJORITY: Mapping[str, str] = {
    "str": "hflow.ops.evaluation.majority_at_k",
    "i32": "hflow.ops.evaluation.majority_number_at_k",
}
ANSWERS = tuple(_MAJORITY)  # dtypes that have a majority


@dataclass(frozen=True)
class MetricDraft:
    """A metric before it is typed. `path`: where its file says it. `answer`: the function that finds the
    answers of a `majority` (`by`), and `dtype` what these are, where that is known."""

    metric: EvaluationMetric
    path: KeyPath
    answer: FunctionSource | None = None
    dtype: DType | None = None


def evaluated_drafts(
    name: str,
    drafts: Mapping[str, NodeDraft],
    names: Collection[str],
    options: Mapping[str, Mapping[str, Any]],
    metrics: Sequence[MetricDraft],
    loop: str,
    problems: Problems,
) -> dict[str, NodeDraft]:
    """Drafts of the nodes of an evaluation, by name.

    Args:
        names: of the step's nodes that run, with all that they depend on.
        options: of some of them, in place of those of the step.
        loop: the step loop, in which all of them stand, those of a region too.
    """
    own = [_renamed(drafts[n], name, options.get(n, drafts[n].options), loop) for n in drafts if n in names]
    calls = [call for metric in metrics for call in _calls(metric, name, loop, problems)]
    return {draft.name: draft for draft in (*own, *calls)}


class EvaluationProblems(Problems):
    """What is wrong only with the options of an evaluation is told at the evaluation; of a metric, at it."""

    def __init__(self, evaluation: str, problems: Problems):
        super().__init__(problems.document)
        self._evaluation, self._problems = evaluation, problems

    def add(
        self,
        code: str,
        message: str,
        path: KeyPath,
        *,
        key: bool = False,
        help: str = "",
        severity: Literal["error", "warning"] = "error",
    ) -> None:
        message, help = (text.replace(evaluated_node("", self._evaluation), "") for text in (message, help))
        place: KeyPath = ("evaluations", self._evaluation)
        if path[:2] == place:
            self._problems.add(code, message, path, key=key, help=help, severity=severity)
        else:
            message = f"with its options {message}"
            self._problems.add(code, message, place, key=True, help=help, severity=severity)


def _renamed(draft: NodeDraft, evaluation: str, options: Mapping[str, Any], loop: str) -> NodeDraft:
    """As it runs in the evaluation: once, with the newest weights, in whatever order values ask for."""
    sources = {p: Ref(evaluated_node(r.node, evaluation), r.port) for p, r in draft.sources.items()}
    if draft.op == "data":  # of earlier steps it needs nothing: it has rows of its own
        draft, sources = replace(draft, inputs=(), carried={}), {}
    return replace(
        draft,
        name=evaluated_node(draft.name, evaluation),
        sources=sources,
        options=options,
        outputs=generate.ports(sources.keys(), options) if draft.op == "generate" else draft.outputs,
        model=replace(draft.model, lag=0, delta_weights=None) if draft.model else None,
        after=(),
        region=loop,
        place=(),
        lengths=None,  # the step's, of other rows
    )


def _calls(drafted: MetricDraft, evaluation: str, loop: str, problems: Problems) -> list[NodeDraft]:
    """The nodes that make a metric, in their order; none where the step's own nodes report it."""
    metric, node = drafted.metric, metric_key(evaluation, drafted.metric.name)
    if metric.kind not in ("pass", "majority"):
        return []
    said = {name: metric.options[name] for name in ("k", "threshold")}
    source = _value(metric.source, evaluation)
    if metric.kind == "pass":
        return [_call(node, _shipped(_PASS), {"score": source}, said, drafted, loop, problems)]
    correct = _value(metric.options["correct"], evaluation)
    counted = _shipped(_MAJORITY[drafted.dtype or "str"])
    if drafted.answer is None:
        return [_call(node, counted, {"answer": source, "score": correct}, said, drafted, loop, problems)]
    reads, makes = drafted.answer.signature.inputs[0].name, drafted.answer.signature.outputs[0].name
    defaults = {option.name: option.default for option in drafted.answer.options}
    first = _call(f"{node}/answer", drafted.answer, {reads: source}, defaults, drafted, loop, problems)
    sources = {"answer": Ref(first.name, makes), "score": correct}
    return [first, _call(node, counted, sources, said, drafted, loop, problems)]


def _call(
    name: str,
    function: FunctionSource,
    sources: Mapping[str, Ref],
    options: Mapping[str, Any],
    drafted: MetricDraft,
    loop: str,
    problems: Problems,
) -> NodeDraft:
    span = problems.document.span(drafted.path, key=True) if problems.document else None
    bare = NodeDraft(
        name, "call", None, None, sources, options=options, region=loop, place=drafted.path, span=span
    )
    return with_function(bare, function)


def _shipped(reference: str) -> FunctionSource:
    return read_function(reference, Path())


def _value(ref: str, evaluation: str) -> Ref:
    node, _, port = ref.partition(".")
    return Ref(evaluated_node(node, evaluation), port)
