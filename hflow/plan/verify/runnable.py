"""Plans that can be made but not run: of models without weights, of families without an engine, or with nodes
that no engine executes so."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.infer.kinds.generate import ROUTES
from hflow.graph.ir import Node
from hflow.plan.engine_registry import DEFAULT_ENGINE, profile_of
from hflow.plan.families.registry import FAMILIES, RUNNING
from hflow.plan.model_shape import NAMED
from hflow.plan.plan import Plan
from hflow.plan.replicas import Instance, instance_of
from hflow.plan.techniques import NO_TECHNIQUES


def check_runnable(plan: Plan) -> None:
    """Raises HflowError HF406 with every model that no engine can build, and every node that none can run as
    planned; asks nothing of the file system."""
    if problems := unrunnable(plan):
        raise HflowError(problems)


def unrunnable(plan: Plan) -> tuple[Diagnostic, ...]:
    """What `check_runnable` raises, if anything."""
    return (
        *_techniques(plan),
        *_models(plan),
        *_nodes(plan),
        *_engines(plan),
        *_left_out(plan),
        *_routes(plan),
        *_optimizers(plan),
        *_vocabularies(plan),
        *_servers(plan),
    )


def _techniques(plan: Plan) -> Iterator[Diagnostic]:
    if plan.cluster.techniques != NO_TECHNIQUES:
        message = "the plan is for engines with techniques that none has: compile only"
        yield Diagnostic("HF406", message, help="a cluster as its file has it")


def _models(plan: Plan) -> Iterator[Diagnostic]:
    for model in plan.graph.models:
        family = plan.shapes[model.name].family
        if model.path.startswith(NAMED):
            message = f"model `{model.name}`: `{model.path}` is a shape without weights: compile only"
            yield Diagnostic(
                "HF406", message, model.span, "to run, `path` is a folder with a Hugging Face model"
            )
        elif not FAMILIES[family].runs:
            message = f"model `{model.name}` is of family {family}, which no engine builds yet: compile only"
            yield Diagnostic("HF406", message, model.span, f"families that run: {', '.join(RUNNING)}")


def _nodes(plan: Plan) -> Iterator[Diagnostic]:
    for node in (n for n in plan.graph.nodes if n.model):
        own = plan.node(node.name)
        strategy, whole = own.strategy, node.op not in profile_of(own.engine).cuts_rows
        names = {
            f"cp {own.mesh.cp}": own.mesh.cp > 1 and whole,
            "sequence parallelism": strategy.sp and whole,
            f"vpp {strategy.vpp}": strategy.vpp > 1 and not _has_chunks(plan, node),
            "ZeRO-3": strategy.zero == 3,
            f"ep {strategy.ep}": strategy.ep > 1 and not _shares_experts(plan, node),
            "generation without a KV cache": not strategy.kv_cache,
        }
        for name in (name for name, planned in names.items() if planned):
            message = f"`{node.name}` is planned with {name}, which no engine runs yet: compile only"
            help_ = "tp, pp, dp, recompute, ZeRO-1 and, to score and train, cp, sp and ep run; vpp to train"
            yield Diagnostic("HF406", message, node.span, help_)


def _has_chunks(plan: Plan, node: Node) -> bool:
    """Whether it is trained, and each rank of pp has equally many of its layers in each chunk."""
    own = plan.node(node.name)
    layers = plan.shapes[node.model_use.model].num_layers
    return node.op == "train" and layers % (own.mesh.pp * own.strategy.vpp) == 0


def _shares_experts(plan: Plan, node: Node) -> bool:
    """Whether its replicas can hold a part of the experts each."""
    own = plan.node(node.name)
    moe = plan.shapes[node.model.model].moe if node.model else None
    if moe is None or moe.num_experts % own.strategy.ep:
        return False
    return node.op in profile_of(own.engine).expert_parallel


def _engines(plan: Plan) -> Iterator[Diagnostic]:
    """Nodes of a kind that their engine does not run."""
    for node in (n for n in plan.graph.nodes if n.model):
        engine = profile_of(plan.node(node.name).engine)
        if node.op not in engine.ops:
            message = f"`{node.name}` is planned on {engine.title}, which runs no {node.op} nodes"
            yield Diagnostic("HF406", message, node.span, "compile the graph again")


def _left_out(plan: Plan) -> Iterator[Diagnostic]:
    """Nodes whose engine would compute another model than the folder says."""
    for node in (n for n in plan.graph.nodes if n.model):
        engine, model = profile_of(plan.node(node.name).engine), node.model_use.model
        if lacking := engine.lacks(plan.shapes[model]):
            message = f"`{node.name}` is planned on {engine.title}, which does not apply what `{model}` has: "
            help_ = f"`--engine {node.name}={DEFAULT_ENGINE}`"
            yield Diagnostic("HF406", message + lacking, node.span, help_)


def _routes(plan: Plan) -> Iterator[Diagnostic]:
    """Nodes whose engine neither tells nor follows the experts that routers chose."""
    for node in (n for n in plan.graph.nodes if n.model and (n.output(ROUTES) or n.input(ROUTES))):
        engine = profile_of(plan.node(node.name).engine)
        if node.op not in engine.routes:
            message = f"`{node.name}` is planned on {engine.title}, which knows no `{ROUTES}`"
            help_ = f"`--engine {node.name}={DEFAULT_ENGINE}`"
            yield Diagnostic("HF406", message, node.span, help_)


def _vocabularies(plan: Plan) -> Iterator[Diagnostic]:
    """Nodes whose engine cuts the vocabulary over tp otherwise than their weights are planned to lie."""
    for node, model in ((n, n.model.model) for n in plan.graph.nodes if n.model):
        own, vocab = plan.node(node.name), plan.shapes[model].vocab
        engine, tp = profile_of(own.engine), own.mesh.tp
        if tp > 1 and vocab % engine.vocab_unit:
            message = f"`{node.name}` is planned on {engine.title} with tp{tp}, which cuts the {vocab} tokens"
            message += f" of `{model}` otherwise than hflow: they are no multiple of {engine.vocab_unit}"
            help_ = f"`--pin {node.name}=tp1`, or add rows to the embedding"
            yield Diagnostic("HF406", message, node.span, help_)


def _servers(plan: Plan) -> Iterator[Diagnostic]:
    """Nodes whose servers would have more ranks on one host than on another."""
    for node in (n for n in plan.graph.nodes if n.model):
        own = plan.node(node.name)
        engine = profile_of(own.engine)
        if engine.server and not all(map(plan.cluster.is_even, own.mesh.groups("tp"))):
            message = f"`{node.name}` is planned on {engine.title} with tp{own.mesh.tp}, of which hosts have"
            help_ = f"`--pin {node.name}=tp{own.mesh.tp}@…` with devices that begin where a host does"
            yield Diagnostic("HF406", f"{message} unequal shares", node.span, help_)


def _optimizers(plan: Plan) -> Iterator[Diagnostic]:
    """Train nodes that share weights share their optimizer, which is split or is not."""
    first: dict[Instance, Node] = {}
    for node in (n for n in plan.graph.nodes if n.op == "train"):
        own = plan.node(node.name)
        other = first.setdefault(instance_of(node, own.sharding), node)
        if (own.strategy.zero == 1) != (plan.node(other.name).strategy.zero == 1):
            message = f"`{other.name}` and `{node.name}` share an optimizer; only one is planned with ZeRO-1"
            yield Diagnostic("HF406", message, node.span, "plan both so, or none")
