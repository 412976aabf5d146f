"""The models of a plan that live on one device, built once when the plan is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hflow.compiler.cost.strategy import PLAIN
from hflow.compiler.instances import Instance, instance_of, instances
from hflow.compiler.plan import Instruction, NodePlan, Plan
from hflow.graph.graph import Node
from hflow.runtime.engines.base import Engine
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.megatron.weights import MegatronWeights
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.tokenizer import Tokenizer, load_tokenizer
from hflow.runtime.worker.world import World


@dataclass(frozen=True)
class Engines:
    """`models` has an entry for every instance whose mesh this device belongs to."""

    models: dict[Instance, MegatronModel]
    python: PythonEngine

    def of(self, node: Node, plan: NodePlan) -> Engine:
        return self.model(node, plan) if node.model else self.python

    def model(self, node: Node, plan: NodePlan) -> MegatronModel:
        """What runs a node that uses a model, on a device of its mesh."""
        return self.models[instance_of(node, plan.sharding)]

    def weights(self, instance: Instance) -> MegatronWeights | None:
        """The weights of an instance on this device, or None when its mesh is elsewhere."""
        model = self.models.get(instance)
        return model.weights if model else None


def build_engines(plan: Plan, world: World) -> Engines:
    """Collective over the world: all ranks make all groups, members build and load their shards.

    What the programs put away after its use begins there, before the next model is built.
    """
    tokenizers: dict[str, Tokenizer] = {m.name: load_tokenizer(m.path) for m in plan.graph.models}
    models: dict[Instance, MegatronModel] = {}
    offloaded, released = _put_away(plan, "offload"), _put_away(plan, "release")
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
            strategy=plan.node(trainer.name).strategy if trainer else PLAIN,
        )
        if not model.member:
            continue
        models[instance] = model
        if instance in offloaded:
            model.offload()
        if instance in released:
            model.weights.release()
    return Engines(models, PythonEngine(tokenizers))


def _put_away(plan: Plan, op: Literal["offload", "release"]) -> set[Instance]:
    """The instances that some instruction `op` puts away."""
    programs = [p for p in (plan.step, plan.evaluation) if p]
    nodes = [p.graph.node(i.target) for p in programs for i in _all(p.instructions) if i.op == op]
    return {instance_of(node, plan.node(node.name).sharding) for node in nodes}


def _all(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    for instruction in instructions:
        yield instruction
        yield from _all(instruction.body)
