"""What the section `run` says about a graph: whether what it names can exist.

The columns of ``metrics.jsonl`` come from what nodes report, which is not known before they run. So a name is
refused only where its node is none of the graph's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from hflow.diagnostics import CODES, did_you_mean
from hflow.graph.infer.draft import NodeDraft
from hflow.graph.ir import Graph
from hflow.graph.source.problems import Problems
from hflow.graph.source.run_schema import RunSpec

REWARD = "reward_mean"
_PLAIN = (REWARD, "step", "time_s", "tokens", "tokens_per_s")  # of every run; REWARD of most
_BEST = ("run", "checkpoint", "best")


@dataclass(frozen=True)
class MetricNames:
    """What is known of the columns of ``metrics.jsonl``: `nodes` are all nodes, `trains` those that train
    (None where the kind of some node is unknown), `values` what calls compute, `evaluated` the metrics of the
    named evaluations, which stand in events."""

    nodes: frozenset[str]
    trains: frozenset[str] | None
    values: frozenset[str]
    evaluated: frozenset[str] = frozenset()

    def names(self) -> Iterator[str]:
        """Likely ones, to suggest."""
        yield from _PLAIN
        yield from (f"loss.{name}" for name in sorted(self.trains or ()))
        yield from sorted(self.evaluated)
        yield from sorted(self.values)

    def refusal(self, name: str) -> str:
        """Why there can be no such metric; empty if there may be one."""
        if name.startswith("eval/"):
            return "" if name in self.evaluated else f"no evaluation measures `{name}`"
        kind, dot, node = name.partition(".")
        if not dot:
            return "" if name in _PLAIN else f"no metric is called `{name}`"
        if kind in self.nodes:
            return ""
        if kind == "digest":
            return f"`{name}` is a hash, of which none is the best"
        if kind == "loss" and self.trains is not None and node not in self.trains:
            return f"no train node is called `{node}`"
        if kind in ("loss", "time_s"):
            return "" if node in self.nodes else f"no node is called `{node}`"
        return f"no node is called `{kind}`"


def metric_names(graph: Graph) -> MetricNames:
    """Those of a typed graph."""
    calls = (node for node in graph.nodes if node.op == "call")
    return MetricNames(
        frozenset(node.name for node in graph.nodes),
        frozenset(node.name for node in graph.nodes if node.op == "train"),
        frozenset(f"{node.name}.{output.port}" for node in calls for output in node.outputs),
        frozenset(key for evaluation in graph.evaluations for key in evaluation.keys),
    )


def drafted_metric_names(
    drafts: Mapping[str, NodeDraft], declared: Iterable[str], evaluated: frozenset[str] = frozenset()
) -> MetricNames:
    """Those of a graph that may still be wrong; `declared` names all nodes of the file, `evaluated` the
    metrics of its named evaluations."""
    calls = (draft for draft in drafts.values() if draft.op == "call")
    trains = frozenset(name for name, draft in drafts.items() if draft.op == "train")
    return MetricNames(
        frozenset(declared),
        trains if drafts.keys() >= {*declared} else None,
        frozenset(f"{draft.name}.{port}" for draft in calls for port in draft.outputs or ()),
        evaluated,
    )


def check_run(spec: RunSpec, metrics: MetricNames, problems: Problems) -> None:
    """HF228: `best` names nothing that a run of the graph can report, or is missing; as a warning, what has
    no effect."""
    checkpoint = spec.checkpoint
    if refusal := metrics.refusal(checkpoint.best) if checkpoint.best else "":
        help_ = did_you_mean(checkpoint.best, metrics.names(), "metrics")
        problems.add("HF228", refusal, _BEST, help=help_)
    if spec.export == "best" and not checkpoint.best:
        message = "`export: best` does not say by which metric"
        help_ = f"name one: `checkpoint: {{every: 10, best: {REWARD}}}`"
        problems.add("HF228", message, ("run", "export"), help=help_)
    _check_restarts(spec, problems)
    _check_shown(spec, metrics, problems)
    if checkpoint.best and not checkpoint.every and not checkpoint.seconds:
        message = "`best` chooses among checkpoints, and none is written while the run goes"
        _warn(problems, message, "best", "say how often: `every: 10` (steps) or `seconds: 600`")
    if checkpoint.mode != "max" and not checkpoint.best:
        _warn(problems, f"`mode: {checkpoint.mode}` has no effect without `best`", "mode", "")


def _check_shown(spec: RunSpec, metrics: MetricNames, problems: Problems) -> None:
    for number, name in enumerate(spec.show):
        of_node = name.removeprefix("digest.")
        if of_node != name and of_node in metrics.nodes:
            continue
        if refusal := metrics.refusal(name):
            known = [known for known in metrics.names() if "/" not in known]
            help_ = did_you_mean(name, known, "metrics")
            problems.add("HF228", refusal, ("run", "show", number), help=help_)


def _check_restarts(spec: RunSpec, problems: Problems) -> None:
    if unknown := next((code for code in spec.retry if code not in CODES), ""):
        help_ = did_you_mean(unknown, [code for code in CODES if code.startswith("HF4")], "codes")
        problems.add("HF228", f"no failure has the code `{unknown}`", ("run", "retry"), help=help_)
    for key in ("elastic", "retry"):
        if getattr(spec, key) and not spec.restarts:
            message = f"`{key}` is about beginning again, and `restarts` is 0"
            problems.add("HF228", message, ("run", key), help="say how often: `restarts: 3`")


def check_reward(spec: RunSpec, graph: Graph, problems: Problems) -> None:
    """HF228: `best` is the mean reward of a graph that has no reward; as a warning, it is measured at other
    steps than checkpoints are written, or there are no responses whose lengths `replan` could plan with."""
    _check_measured(spec, graph, problems)
    _check_replan(spec, graph, problems)
    if spec.checkpoint.best == REWARD and not graph.reward:
        message = f"the graph has no reward, so there is no `{REWARD}`"
        losses = [f"loss.{node.name}" for node in graph.nodes if node.op == "train"]
        help_ = f"with `mode: min`, `{losses[0]}` may serve" if losses else ""
        problems.add("HF228", message, _BEST, help=help_)


def _check_measured(spec: RunSpec, graph: Graph, problems: Problems) -> None:
    """A checkpoint of which `best` is not measured cannot be the best."""
    every, best = spec.checkpoint.every, spec.checkpoint.best
    measured = {f"evaluations.{e.name}": e.every for e in graph.evaluations if best in e.keys}
    if graph.evaluation and str(graph.evaluation.metric) == best:
        measured["eval"] = graph.evaluation.every
    for evaluation, at in measured.items():
        if not every or (at and every % at == 0):
            continue
        message = f"a checkpoint is written every {every} steps, and `{best}` is not measured at each of them"
        help_ = f"those between are never the best; `{evaluation}.every` may be {every}, or a divisor of it"
        _warn(problems, message, "best", help_)


def _check_replan(spec: RunSpec, graph: Graph, problems: Problems) -> None:
    if not spec.replan.every or any(node.op == "generate" for node in graph.nodes):
        return
    message = "`replan` plans with the lengths of responses, and the graph has no node that generates"
    problems.add("HF228", message, ("run", "replan"), severity="warning")


def _warn(problems: Problems, message: str, key: Literal["best", "mode"], help_: str) -> None:
    problems.add("HF228", message, ("run", "checkpoint", key), help=help_, severity="warning")
