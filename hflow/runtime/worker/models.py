"""The models of a plan that live on one device, built once when the plan is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.compiler.instances import Instance, instance_of, instances
from hflow.compiler.plan import NodePlan, Plan
from hflow.graph.graph import Node
from hflow.runtime.engines.base import Engine, Weights
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.tokenizer import Tokenizer, load_tokenizer
from hflow.runtime.worker.world import World


@dataclass(frozen=True)
class Engines:
    """`models` has an entry for every instance whose mesh this device belongs to."""

    models: dict[Instance, MegatronModel]
    python: PythonEngine

    def of(self, node: Node, plan: NodePlan) -> Engine:
        return self.models[instance_of(node, plan.sharding)] if node.model else self.python

    def weights(self, instance: Instance) -> Weights | None:
        """The weights of an instance on this device, or None when its mesh is elsewhere."""
        model = self.models.get(instance)
        return model.weights if model else None


def build_engines(plan: Plan, world: World) -> Engines:
    """Collective over the world: all ranks make all groups, members build and load their shards."""
    tokenizers: dict[str, Tokenizer] = {m.name: load_tokenizer(m.path) for m in plan.graph.models}
    models: dict[Instance, MegatronModel] = {}
    graphs = [p.graph for p in (plan.step, plan.evaluation) if p]
    for instance, trainer in instances(graphs, {n.node: n.sharding for n in plan.nodes}).items():
        model = MegatronModel(
            model=plan.graph.model(instance.model),
            shape=plan.shapes[instance.model],
            mesh=instance.mesh,
            rank=world.rank,
            new_group=world.group,
            tokenizer=tokenizers[instance.model],
            device=world.device,
            train_options=trainer.options if trainer else None,
        )
        if model.member:
            models[instance] = model
    return Engines(models, PythonEngine(tokenizers))
