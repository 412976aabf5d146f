"""The models of a plan that live on one device, built once when the plan is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace

from hflow.graph.ir import Node
from hflow.plan.frozen import averaging
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.plan.program import Offload, Release, with_bodies
from hflow.plan.replicas import Instance, instance_of, instances, shared_server
from hflow.runtime.chat.load_checks import check_chats
from hflow.runtime.engines.implementation import implementation
from hflow.runtime.engines.protocol import ModelEngine, ModelSetup, ModelWeights, NodeEngine
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.engines.python.function_process import FunctionProcess
from hflow.runtime.tokenizer import Tokenizer, load_tokenizer
from hflow.runtime.worker.world import World


@dataclass(frozen=True)
class Engines:
    """`models` has an entry for every instance whose mesh this device belongs to."""

    models: dict[Instance, ModelEngine]
    python: PythonEngine

    def of(self, node: Node, plan: NodePlan) -> NodeEngine:
        return self.model(node, plan) if node.model else self.python

    def model(self, node: Node, plan: NodePlan) -> ModelEngine:
        """What runs a node that uses a model, on a device of its mesh."""
        return self.models[instance_of(node, plan.sharding)]

    def weights(self, instance: Instance) -> ModelWeights | None:
        """The weights of an instance on this device, or None when its mesh is elsewhere."""
        model = self.models.get(instance)
        return model.weights if model else None

    def close(self) -> None:
        """End the processes that engines have started."""
        for model in self.models.values():
            model.close()


def build_engines(
    plan: Plan, world: World, told: Callable[[str], None], functions: FunctionProcess | None = None
) -> Engines:
    """Collective over the world: all ranks make all groups, members build and load their shards.

    What the programs put away after its use begins there, before the next model is built. Models whose frozen
    weights are those of others come after these. When one fails, the servers of those before it end.

    Args:
        told: hears what is done while it takes long.
        functions: where functions of users run; None: in this process.
    """
    vocab = {name: shape.vocab for name, shape in plan.shapes.items()}
    tokenizers = {m.name: load_tokenizer(m.path, vocab[m.name]) for m in plan.graph.models}
    check_chats(plan, tokenizers)
    engines = Engines({}, PythonEngine(tokenizers, functions))
    try:
        _build(engines, plan, world, tokenizers, told)
    except BaseException:
        engines.close()
        raise
    return engines


def _build(
    engines: Engines,
    plan: Plan,
    world: World,
    tokenizers: Mapping[str, Tokenizer],
    told: Callable[[str], None],
) -> None:
    offloaded, released = _put_away(plan, Offload), _put_away(plan, Release)
    graphs = [program.graph for program in plan.programs]
    found = instances(graphs, {n.node: n.sharding for n in plan.all_nodes})
    base_of = {own: base for own in found if (base := _base(plan, own, found))}
    server_of = _shared_servers(plan, found)
    for instance in sorted(found, key=lambda own: own in base_of or own in server_of):
        served = {own for own, server in server_of.items() if server == instance}
        setup = _setup(plan, instance, served, instance in released, world, tokenizers[instance.model], told)
        if instance in base_of:
            setup = replace(setup, base=engines.models.get(base_of[instance]))
        model = _built(engines, setup, server_of.get(instance))
        if model is None:
            continue
        engines.models[instance] = model
        if instance in offloaded:
            model.offload()
        if instance in released:
            model.weights.release()


def _built(engines: Engines, setup: ModelSetup, server: Instance | None) -> ModelEngine | None:
    """`server`: an instance of `engines` whose server it shares; None: it has its own, if any."""
    if server is None:
        return implementation(setup.sharding.engine).build(setup)
    older = engines.models.get(server)
    return older.evaluator() if older else None


def _shared_servers(plan: Plan, found: Iterable[Instance]) -> dict[Instance, Instance]:
    """For the instances that servers with older weights evaluate, too, these servers' own."""
    own = instances([plan.graph], {n.node: n.sharding for n in plan.all_nodes})
    return {each: server for each in found if (server := shared_server(each, own))}


def _base(plan: Plan, own: Instance, found: Mapping[Instance, Node | None]) -> Instance | None:
    """The trained weights of another model, which has the frozen ones of this. Readers of a trained model
    have copies of all."""
    model = plan.graph.model(own.model)
    if model.base is None or (found[own] is None and plan.graph.trainers(model.name)):
        return None
    base = Instance(model.base, own.sharding)
    return base if found.get(base) else None


def _setup(
    plan: Plan,
    instance: Instance,
    served: Set[Instance],
    renewed: bool,
    world: World,
    tokenizer: Tokenizer,
    told: Callable[[str], None],
) -> ModelSetup:
    """`served`: the instances that share its server."""
    nodes = (n for program in plan.programs for n in program.graph.nodes if n.model)
    planned = ((node, plan.node(node.name)) for node in nodes)  # one may read other weights in each program
    return ModelSetup(
        model=plan.graph.model(instance.model),
        shape=plan.shapes[instance.model],
        sharding=instance.sharding,
        rank=world.rank,
        device=world.device,
        tokenizer=tokenizer,
        new_group=world.group,
        nodes=tuple((n, own) for n, own in planned if instance_of(n, own.sharding) in {instance, *served}),
        averaging=tuple(plan.graph.model(name) for name in averaging(plan.graph, instance.model)),
        renewed=renewed,
        server_bytes=plan.cluster.server_bytes,
        seed=plan.graph.seed,
        cores=world.cores,
        stopped=world.aborted,
        told=told,
    )


def _put_away(plan: Plan, kind: type[Offload | Release]) -> set[Instance]:
    """The instances that some instruction of a kind puts away."""
    found = ((p.graph, i) for p in plan.programs for i in with_bodies(p.instructions))
    nodes = [graph.node(i.node) for graph, i in found if isinstance(i, kind)]
    return {instance_of(node, plan.node(node.name).sharding) for node in nodes}
