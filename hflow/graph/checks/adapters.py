"""What holds for models with adapters, and for nodes that use a model without its own."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.graph.infer.draft import NodeDraft
from hflow.graph.source.problems import Problems
from hflow.graph.source.schema import AdapterSpec, GraphSpec


def check_adapters(drafts: Mapping[str, NodeDraft], spec: GraphSpec, problems: Problems) -> None:
    """HF230 an adapter without rank, one that nothing trains and that lies in no folder, that stands beside
    `freeze` or `refresh`, or whose model another one would take over; a base of a model without one, or of a
    node that does not score."""
    adapted = {name for name, model in spec.models.items() if model.adapter}
    for name in adapted:
        _check_model(name, spec, drafts, problems)
    for draft in (d for d in drafts.values() if d.model):
        assert draft.model
        if draft.model.base and draft.model.model in spec.models:
            _check_base(draft, adapted, problems)
        if draft.op == "train" and draft.model.model in adapted and draft.options.get("freeze"):
            message = f"`freeze` has no effect: `{draft.model.model}` has an adapter, which alone is trained"
            problems.add("HF230", message, (*draft.path, "with", "freeze"), key=True)


def _check_model(name: str, spec: GraphSpec, drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    path, own = ("models", name, "adapter"), spec.models[name]
    assert own.adapter
    if own.adapter.path is None and own.adapter.rank is None:
        help_ = "say the `rank` of a new one, or the `path` of a folder with one"
        problems.add(
            "HF230", f"the adapter of `{name}` has neither rank nor folder", path, key=True, help=help_
        )
    if own.refresh:
        message = f"`{name}` takes over all weights of `{own.refresh.from_}`, and none are an adapter's"
        problems.add("HF230", message, path, key=True, help="drop `adapter`, or `refresh`")
    elif not any(d.op == "train" and d.model and d.model.model == name for d in drafts.values()):
        _check_untrained(name, own.adapter, problems)
    for reader, model in spec.models.items():
        if model.refresh and model.refresh.from_ == name:
            message = f"`{reader}` cannot take over the weights of `{name}`, of which an adapter is trained"
            help_ = "drop `refresh`: without the adapter, the model stays as it began"
            problems.add("HF230", message, ("models", reader, "refresh"), key=True, help=help_)


def _check_untrained(name: str, adapter: AdapterSpec, problems: Problems) -> None:
    path = ("models", name, "adapter")
    if adapter.path is None:
        message = f"no node trains `{name}`, so its adapter would never change anything"
        help_ = "a frozen model has an adapter with `path`, the folder that it lies in"
        problems.add("HF230", message, path, key=True, help=help_)
    elif adapter.dropout:
        message = f"`dropout` has no effect: no node trains `{name}`"
        problems.add("HF230", message, (*path, "dropout"), key=True)


def _check_base(draft: NodeDraft, adapted: set[str], problems: Problems) -> None:
    assert draft.model
    path = (*draft.path, "model", "base")
    if draft.op != "score":
        message = f"`{draft.name}` ({draft.op}) cannot use a model without its adapter"
        problems.add("HF230", message, path, key=True, help="score nodes can")
    elif draft.model.model not in adapted:
        message = f"`{draft.model.model}` has no adapter, so it is its own base"
        problems.add("HF230", message, path, key=True, help="drop `base: true`")
    elif draft.model.lag:
        problems.add("HF230", "`lag` has no effect: a base never changes", path, key=True)
