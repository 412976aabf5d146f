"""What holds for a model whose frozen weights are those of another trained one."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.diagnostics import did_you_mean
from hflow.graph.infer.bases import settled_dtypes
from hflow.graph.infer.draft import NodeDraft
from hflow.graph.source.problems import Problems
from hflow.graph.source.schema import GraphSpec, ModelSpec


def check_bases(drafts: Mapping[str, NodeDraft], spec: GraphSpec, problems: Problems) -> None:
    """HF202 a base of an unknown model; HF230 one of a model that has other frozen weights, or none."""
    trained = {d.model.model for d in drafts.values() if d.op == "train" and d.model}
    for name, model in spec.models.items():
        if model.base is None:
            continue
        path = ("models", name, "base")
        if problems.document and model.base not in problems.document.keys(("models",)):
            help_ = did_you_mean(model.base, spec.models, "models")
            problems.add("HF202", f"unknown model `{model.base}`", path, help=help_)
        elif model.base in spec.models:
            message, help_ = _problem(name, model, spec, trained)
            if not message and name not in trained:
                message, help_ = _unscored(name, drafts)
            if message:
                problems.add("HF230", message, path, help=help_)


def _unscored(name: str, drafts: Mapping[str, NodeDraft]) -> tuple[str, str]:
    """As `_problem`, of a frozen model that not only scores."""
    users = (d for d in drafts.values() if d.model and d.model.model == name)
    other = next((d for d in users if d.op != "score" or (d.model and d.model.base)), None)
    if other is None:
        return "", ""
    what = "use it without its adapter" if other.op == "score" else f"be used by a {other.op} node"
    return f"`{name}` is frozen and on a shared base, so it cannot {what} (`{other.name}`)", "drop `base`"


def _problem(name: str, model: ModelSpec, spec: GraphSpec, trained: set[str]) -> tuple[str, str]:
    """Why the base of `model.base` cannot be that of a model, and what helps; empty where it can."""
    owner = model.base or name
    other = spec.models[owner]
    if owner == name:
        return f"`{name}` is its own base", "drop `base`"
    if other.base is not None:
        help_ = f"write `base: {other.base}`" if other.base != name else "drop one of the two"
        return f"`{owner}` has its frozen weights from `{other.base}`", help_
    without = next((n for n, m in ((name, model), (owner, other)) if not m.adapter), None)
    if without:
        return (
            f"`{without}` has no adapter, so none of its weights are frozen",
            f"give `{without}` an adapter",
        )
    is_stored = model.adapter is not None and model.adapter.path is not None
    untrained = next((n for n in (name, owner) if n not in trained and not (n == name and is_stored)), None)
    if untrained:
        help_ = "score nodes use it with `model: {use: MODEL, base: true}`"
        if untrained == owner:
            help_ = "let the frozen model have the base of a trained one"
        return f"no node trains `{untrained}`: models share the base of a trained one", help_
    for key, own, its in (
        ("path", model.path, other.path),
        ("dtype", model.dtype, settled_dtypes(spec)[owner]),
    ):
        if own not in (its, "auto"):
            message = f"`{name}` has `{key}: {own}`, `{owner}` has `{key}: {its}`"
            return message, "both models begin in one folder, in one dtype"
    if (model.head, other.head) == ("lm", "scalar"):
        message = f"`{owner}` has a scalar head, and none of the frozen matrix that gives `{name}` its logits"
        return message, f"give `{owner}` `base: {name}` instead"
    return "", ""
