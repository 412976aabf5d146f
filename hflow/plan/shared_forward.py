"""Score nodes whose forward pass is also that of the first update of their model's train node.

PPO's `values` and the first minibatch of `critic_train` pass the same rows through the same weights. With
`Strategy.share_forward` the score node keeps what the backward pass needs, and the train node begins with it.
All values are there before any backward pass, as GAE asks for; the price is memory: activations of a whole
minibatch, where training alone has those of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from hflow.graph.ir import Graph, Node, Ref
from hflow.plan.model_shape import ModelShape


def sharing(graph: Graph, shapes: Mapping[str, ModelShape]) -> dict[str, str]:
    """The score nodes that may share their forward pass, with the train node that each shares it with; of
    several for one train node the first."""
    found: dict[str, str] = {}
    for node in (n for n in graph.nodes if n.op == "score"):
        for trainer in graph.trainers(node.model_use.model)[:1]:
            taken = trainer.name in found.values()
            if not taken and not refusal(graph, shapes[node.model_use.model], node, trainer):
                found[node.name] = trainer.name
    return found


def refusal(graph: Graph, shape: ModelShape, node: Node, trainer: Node) -> str:
    """Why a score node and one that trains its model cannot have one forward pass; empty if they can."""
    model = node.model_use.model
    used = {n.name for n in graph.nodes if n.model and n.model.model == model} - {node.name, trainer.name}
    drops = shape.adapter is not None and shape.adapter.dropout
    reasons = {
        f"several nodes train `{model}`": len(graph.trainers(model)) > 1,
        f"`{node.name}` scores with other weights": node.model_use.lag > 0 or node.model_use.base,
        f"they are in rounds of `{node.region}`": {node.region, trainer.region} != {graph.regions[0].name},
        f"`{trainer.name}` does not wait for `{node.name}`": node.name not in graph.ancestors[trainer.name],
        "they read other rows": any(_source(node, p) != _source(trainer, p) for p in ("tokens", "mask")),
        f"other nodes may use `{model}` between them": bool(used - graph.ancestors[node.name]),
        "training counts and balances its experts": shape.moe is not None,
        "training drops inputs of the adapter": bool(drops),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _source(node: Node, port: str) -> tuple[Ref, int] | None:
    found = node.input(port)
    return (found.source, found.lag) if found else None
