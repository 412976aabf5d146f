"""The models of a plan that live on one device, built once when the plan is loaded.

Nodes of one model on one mesh share an instance (and so its weights); a reader on another mesh has its
own, refreshed over its weight edge.
"""

from __future__ import annotations

from dataclasses import dataclass

from hflow.compiler.layout import Mesh
from hflow.compiler.plan import NodePlan, Plan
from hflow.runtime.engines.base import Engine, Weights
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.tokenizer import Tokenizer, load_tokenizer
from hflow.runtime.worker.world import World

Key = tuple[str, Mesh]


@dataclass(frozen=True)
class Instances:
    """`models` has an entry for every (model, mesh) of the plan that this device belongs to."""

    models: dict[Key, MegatronModel]
    python: PythonEngine

    def engine(self, plan: NodePlan) -> Engine:
        return self.models[plan.model, plan.mesh] if plan.model else self.python

    def weights(self, plan: NodePlan) -> Weights | None:
        """The weights that the node uses, or None when its mesh is elsewhere."""
        assert plan.model
        instance = self.models.get((plan.model, plan.mesh))
        return instance.weights if instance else None


def build_instances(plan: Plan, world: World) -> Instances:
    """Collective over the world: all ranks make all groups, members build and load their shards."""
    tokenizers: dict[str, Tokenizer] = {m.name: load_tokenizer(m.path) for m in plan.graph.models}
    models: dict[Key, MegatronModel] = {}
    for key in dict.fromkeys((n.model, n.mesh) for n in plan.nodes if n.model):
        name, mesh = key
        trainer = next((n for n in plan.nodes if n.kind == "train" and (n.model, n.mesh) == key), None)
        instance = MegatronModel(
            model=plan.graph.model(name),
            shape=plan.shapes[name],
            mesh=mesh,
            rank=world.rank,
            new_group=world.group,
            tokenizer=tokenizers[name],
            device=world.device,
            train_options=plan.graph.node(trainer.node).options if trainer else None,
        )
        if instance.member:
            models[name, mesh] = instance
    return Instances(models, PythonEngine(tokenizers))
