"""Graphs written in Python: the same language as graph files, the same checks, the same `Graph`.

>>> g = GraphBuilder("sft", steps=10)
>>> actor = g.model("actor", path="models/tiny")
>>> examples = g.data(
...     "examples", out={"tokens": "i32[batch, seq~]", "mask": "bool[batch, resp~]"},
...     dataset="sums.jsonl", batch=8, prompt="{{ question }}", response="{{ answer }}",
... )
>>> _ = g.train(
...     "actor_train", model=actor, loss="hflow.ops.losses.negative_log_likelihood",
...     tokens=examples.tokens, lr=1e-4,
... )
>>> g.graph().node("actor_train").rows
8

A keyword of a node is an input if it is a `NodeOutput`, and an option otherwise. Nothing is checked while the
graph is written: `GraphBuilder.graph` reports everything at once, each problem with the file and line of the
call that it comes from. Options may hold expressions over the params: ``batch="${ batch }"``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.builder.builder_text import caller, item, reference
from hflow.graph.builder.builder_values import (
    CarriedOutput,
    ModelHandle,
    NodeHandle,
    NodeOutput,
    RegionHandle,
)
from hflow.graph.ir import Graph, Head
from hflow.graph.load import check_document
from hflow.graph.source.document import Document, Item
from hflow.graph.source.key_order import in_order
from hflow.graph.write.yaml_printer import layout

Named = str | NodeHandle
ItemsByKey = dict[str, Item]


class GraphBuilder:
    """One algorithm under construction.

    `params` are the values that expressions may read; `steps` is how often the step loop runs, and `loop` its
    name.
    """

    def __init__(
        self,
        name: str,
        *,
        steps: int | str,
        doc: str = "",
        params: Mapping[str, Any] | None = None,
        seed: int = 0,
        loop: str = "step",
    ):
        self._span = caller()
        self._problems: list[Diagnostic] = []
        self._models: ItemsByKey = {}
        self._nodes: ItemsByKey = {}
        self._open = self._nodes  # where nodes go: the step loop's, or those of the region being written
        head = {"hflow": 1, "name": name, "doc": doc, "params": params, "seed": seed or None}
        self._head = self._entries(head)
        self._loop = self._item({"name": loop, "times": steps})
        self._eval: Item | None = None
        self._evaluations: ItemsByKey = {}

    def model(
        self,
        name: str,
        path: str,
        *,
        head: Head = "lm",
        frozen: bool = False,
        dtype: str = "auto",
        refresh_from: str | ModelHandle | None = None,
        refresh_every: int | str | None = None,
        refresh_decay: float | str | None = None,
        adapter_rank: int | str | None = None,
        adapter_alpha: float | str | None = None,
        adapter_targets: Sequence[str] | None = None,
        adapter_dropout: float | str | None = None,
        adapter_path: str | None = None,
        base: str | ModelHandle | None = None,
    ) -> ModelHandle:
        """One set of weights. A frozen model with `refresh_from` takes over the weights of that model before
        every `refresh_every`-th step; with `refresh_decay`, their moving average. With `adapter_rank`,
        low-rank matrices beside the model's own are trained, which stay as they are (LoRA); with
        `adapter_path` there are those of a folder of PEFT's; with `base` the model's own are those of another
        such model."""
        spec = {
            "path": path,
            "head": head if head != "lm" else None,
            "frozen": frozen or None,
            "dtype": dtype if dtype != "auto" else None,
            "refresh": _said(**{"from": refresh_from}, every=refresh_every, decay=refresh_decay),
            "adapter": _said(
                path=adapter_path,
                rank=adapter_rank,
                alpha=adapter_alpha,
                targets=adapter_targets,
                dropout=adapter_dropout,
            ),
            "base": base,
        }
        self._add(self._models, name, spec)
        return ModelHandle(name)

    def data(
        self,
        name: str,
        /,
        *,
        out: Mapping[str, str],
        after: Sequence[Named] = (),
        lengths: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> NodeHandle:
        """Rows of a dataset; `out` gives the type of each column. `lengths`: of its prompts, as the planner
        is to expect them: ``{"mean": 200}``."""
        spec = {"op": "data", "after": after, "lengths": lengths, "with": options, "out": out}
        return self._node(name, spec)

    def generate(
        self,
        name: str,
        /,
        *,
        model: str | ModelHandle,
        lag: int | str = 0,
        delta_weights: float | str | None = None,
        after: Sequence[Named] = (),
        out: Mapping[str, str] | None = None,
        lengths: Mapping[str, Any] | None = None,
        **ports: Any,
    ) -> NodeHandle:
        """Samples of a model, `lag` updates old. `delta_weights`: from other hosts come only those of its
        weights that have changed, about this share of all. `lengths`: of its responses, as the planner is to
        expect them: ``{"mean": 1019}``."""
        use = _use(model, lag, delta_weights=delta_weights)
        spec = {"op": "generate", "model": use, "after": after, "lengths": lengths, "out": out}
        return self._node(name, spec, ports)

    def score(
        self,
        name: str,
        /,
        *,
        model: str | ModelHandle,
        lag: int | str = 0,
        base: bool = False,
        delta_weights: float | str | None = None,
        after: Sequence[Named] = (),
        out: Mapping[str, str] | None = None,
        **ports: Any,
    ) -> NodeHandle:
        """What a model says about given texts: log-probs and entropy, or values and a score. `base`: without
        its adapter. `delta_weights`: see `generate`."""
        spec = {"op": "score", "model": _use(model, lag, base, delta_weights), "after": after, "out": out}
        return self._node(name, spec, ports)

    def call(
        self,
        name: str,
        fn: str | Callable[..., Any],
        /,
        *,
        timeout_s: float | str | None = None,
        after: Sequence[Named] = (),
        out: Mapping[str, str] | None = None,
        **ports: Any,
    ) -> NodeHandle:
        """A typed function (`hflow.ops.op.op`), or its name as graph files write it. It is ended after
        `timeout_s` seconds, and the run with it."""
        spec = {"op": "call", "fn": reference(fn, self._span.file), "after": after, "out": out}
        return self._node(name, spec, _said(timeout_s=timeout_s) | ports)

    def train(
        self,
        name: str,
        /,
        *,
        model: str | ModelHandle,
        loss: str | Callable[..., Any],
        epochs: int | str | None = None,
        minibatch: int | str | None = None,
        after: Sequence[Named] = (),
        **ports: Any,
    ) -> NodeHandle:
        """Optimizer steps on a loss: `epochs` passes over the rows, `minibatch` rows at a time."""
        repeat = _said(epochs=epochs, minibatch=minibatch)
        loss = reference(loss, self._span.file)
        spec = {"op": "train", "model": model, "loss": loss, "after": after, "repeat": repeat}
        return self._node(name, spec, ports)

    @contextmanager
    def repeat(
        self, name: str, *, times: int | str, short: str = "fail", after: Sequence[Named] = ()
    ) -> Generator[RegionHandle]:
        """A region: the nodes written inside the ``with`` run in rounds, at most `times`. Say on what it
        gives when the rounds end (`RegionHandle.until`) and what it hands out (`RegionHandle.out`)."""
        spec = {"op": "repeat", "after": after, "times": times, "short": short if short != "fail" else None}
        entries = self._add(self._open, name, spec)
        inner: ItemsByKey = {}
        entries["nodes"] = Item(inner, caller(), caller())
        outer, self._open = self._open, inner
        try:
            yield RegionHandle(name, lambda key, value: entries.update({key: self._item(value)}))
        finally:
            self._open = outer

    def previous(self, value: str | NodeOutput, *, lag: int = 1, init: float | str) -> CarriedOutput:
        """The number that `value` was `lag` steps ago, and `init` in the steps before there was one: an
        input of a node."""
        return CarriedOutput(str(value), lag, init)

    def evaluate(self, metric: str | NodeOutput, *, rows: int | str, every: int | str = 0) -> None:
        """Measure `metric` on held-out rows before the first step, after the last, and `every` so many."""
        self._eval = self._item(_said(metric=str(metric), rows=rows, every=every or None))

    def evaluation(
        self,
        name: str,
        *,
        rows: int | str,
        metrics: Mapping[str, str | NodeOutput | Mapping[str, Any]],
        data: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        every: int | str = 0,
        at: Sequence[str] | None = None,
    ) -> None:
        """One of several evaluations, on `rows` held-out rows or those of `data`, with other options of the
        generate nodes (`sampling`); `metrics` as files write them: ``{"pass": reward.score, "k": 4}``."""
        spec = _said(rows=rows, metrics=metrics, data=data, sampling=sampling, every=every or None)
        entries = self._add(self._evaluations, name, spec)
        if at is not None:  # an empty list says something too
            entries["at"] = self._item(list(at))

    def graph(self) -> Graph:
        """The typed graph.

        Raises:
            HflowError: with everything that is wrong, at the lines that say so.
        """
        return self.check()[0]

    def check(self) -> tuple[Graph, tuple[Diagnostic, ...]]:
        """The typed graph and its warnings. Raises as `graph`."""
        document = self.document()
        if self._problems:
            raise HflowError(self._problems)
        return check_document(document)

    def yaml(self) -> str:
        """The graph file, expressions as they were written; it need not be right."""
        return self.document().text

    def document(self) -> Document:
        """The graph file as a document whose places are those of the Python calls."""
        sections = {
            **self._head,
            "models": Item(self._models, self._span) if self._models else None,
            "loop": self._loop,
            "eval": self._eval,
            "evaluations": Item(self._evaluations, self._span) if self._evaluations else None,
            "nodes": Item(self._nodes, self._span),
        }
        root = in_order(Item({k: section for k, section in sections.items() if section}, self._span))
        return Document(self._span.file, layout(root.plain()), root)

    def _node(self, name: str, spec: Mapping[str, Any], ports: Mapping[str, Any] | None = None) -> NodeHandle:
        inputs = {k: v for k, v in (ports or {}).items() if isinstance(v, (NodeOutput, CarriedOutput))}
        options = {k: v for k, v in (ports or {}).items() if k not in inputs}
        self._add(self._open, name, {"in": inputs, "with": options, **spec})
        return NodeHandle(name)

    def _add(self, section: ItemsByKey, name: str, spec: Mapping[str, Any]) -> ItemsByKey:
        """Put an entry into a section; its keys may still be added to."""
        span, entries = caller(), self._entries(spec)
        if name in section:
            self._problems.append(Diagnostic("HF003", f"`{name}` is defined twice", span))
        section.setdefault(name, Item(entries, span, span))
        return entries

    def _item(self, value: Any) -> Item:
        made, problems = item(value, caller())
        self._problems += problems
        return made

    def _entries(self, spec: Mapping[str, Any]) -> ItemsByKey:
        """The keys of `spec` that say something."""
        return {k: self._item(v) for k, v in spec.items() if v is not None and v not in ("", (), [], {})}


def _said(**entries: Any) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if value is not None}


def _use(
    model: str | ModelHandle, lag: int | str, base: bool = False, delta_weights: float | str | None = None
) -> Any:
    said = _said(lag=lag or None, base=base or None, delta_weights=delta_weights)
    return {"use": model, **said} if said else model
