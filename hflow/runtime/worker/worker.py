"""One worker per device: it keeps its part of the program, its models and its rows, and walks a step.

A plain class: the controller's Ray actor wraps it, and ``--workers inline`` and tests use it as it is.
Failures leave it as plain dictionaries, never as exceptions: Ray would lose their cause.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hflow.compiler.layout import Mesh
from hflow.compiler.plan import Instruction, NodePlan, Plan, Program
from hflow.compiler.ports import input_layout, output_layout
from hflow.diagnostics import HflowError
from hflow.graph.graph import Node
from hflow.runtime.engines.base import Call, NodeError
from hflow.runtime.rows import TORCH_DTYPES, Rows
from hflow.runtime.worker.export import export_model
from hflow.runtime.worker.models import Instances, build_instances
from hflow.runtime.worker.transfer import Peers, move_rows, move_weights
from hflow.runtime.worker.world import Aborted, World

Report = dict[str, Any]


@dataclass
class _Step:
    """What one walk through a program collects."""

    number: int
    evaluation: bool
    store: dict[str, Rows] = field(default_factory=dict[str, Rows])
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    digests: dict[str, int] = field(default_factory=dict[str, int])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tokens: int = 0


class Worker:
    def __init__(self, device: str = "cpu", threads: int = 1):
        self.device = torch.device(device)
        self.world: World | None = None
        self.now = ""
        if self.device.type == "cpu":
            torch.set_num_threads(threads)

    def join(self, store: Store, generation: int, rank: int, size: int) -> Report:
        """Leave the present world, if any, and enter generation `generation` of it as `rank` of `size`."""
        return _guarded(lambda: self._join(store, generation, rank, size), self)

    def load(self, plan: Plan) -> Report:
        """Build the models of `plan` that live here. Collective: every rank makes all process groups."""
        return _guarded(lambda: self._load(plan), self)

    def run(self, step: int, evaluation: bool = False) -> Report:
        """Walk the step's program (or the evaluation's) and report metrics, events and times."""
        return _guarded(lambda: self._run(step, evaluation), self)

    def export(self, model: str, folder: str) -> Report:
        """Gather a trained model on one worker, which writes it to `folder` in HF format. Collective."""
        return _guarded(lambda: self._export(model, Path(folder)), self)

    def abort(self) -> None:
        """Give up transfers under way (called from another thread)."""
        if self.world:
            self.world.aborted.set()

    def where(self) -> str:
        """What runs now, for the progress line."""
        return self.now

    def close(self) -> None:
        if self.world:
            self.world.close()
            self.world = None

    def _join(self, store: Store, generation: int, rank: int, size: int) -> Report:
        self.close()
        self.world = World.join(PrefixStore(f"world{generation}", store), rank, size, self.device)
        return {}

    def _load(self, plan: Plan) -> Report:
        assert self.world
        self.plan = plan
        self.peers = _peers(plan, self.world.group)
        self.instances: Instances = build_instances(plan, self.world)
        return {}

    def _run(self, number: int, evaluation: bool) -> Report:
        program = self.plan.evaluation if evaluation else self.plan.step
        assert program and self.world
        step = _Step(number, evaluation)
        for instruction in program.instructions:
            if self.world.rank in instruction.devices:
                self._execute(program, instruction, step)
        self.now = ""
        return {
            "metrics": step.metrics,
            "digests": step.digests,
            "events": step.events,
            "tokens": step.tokens,
        }

    def _execute(self, program: Program, instruction: Instruction, step: _Step) -> None:
        if instruction.op == "free":
            for handle in instruction.inputs:
                step.store.pop(handle, None)
            return
        self.now, started, received = instruction.target, time.time(), 0
        if instruction.op == "call":
            self._call(program.graph.node(instruction.target), instruction, step)
        elif instruction.op == "transfer":
            received = self._transfer(program, instruction, step)
        else:
            received = self._weights(program, instruction)
        assert self.world
        name = instruction.target if instruction.edge is None else program.edges[instruction.edge].name
        event = {"kind": instruction.op, "name": name, "device": self.world.rank, "bytes": received}
        step.events.append({**event, "step": step.number, "start_s": started, "end_s": time.time()})

    def _call(self, node: Node, instruction: Instruction, step: _Step) -> None:
        assert self.world
        plan, rank = self.plan.node(node.name), self.world.rank
        inputs = {port: step.store[handle] for port, handle in instruction.inputs.items()}
        result = self.instances.engine(plan).run(self._describe(node, plan, step), inputs)
        for output in node.outputs:
            if rank in output_layout(node, plan.mesh, output.type).boxes((output.type.rows,)):
                step.store[instruction.outputs[output.port]] = result.outputs[output.port]
        at = plan.mesh.coordinates(rank)
        speaks = at["tp"] == 0 and at["pp"] == 0
        if speaks or plan.engine != "python":
            step.metrics.update({f"{node.name}.{name}": pair for name, pair in result.metrics.items()})
        if result.digest is not None:
            step.digests[node.name] = result.digest
        if speaks and node.name in _token_makers(self.plan, step.evaluation):
            step.tokens += len((result.outputs if node.op == "generate" else inputs)["tokens"].values)

    def _describe(self, node: Node, plan: NodePlan, step: _Step) -> Call:
        assert self.world
        type_ = node.inputs[0].type if node.inputs else node.outputs[0].type
        start, stop = input_layout(plan.mesh, type_).boxes((type_.rows,))[self.world.rank][0]
        seed = self.plan.graph.seed
        return Call(node, plan, start, stop - start, seed, step.number, step.evaluation)

    def _transfer(self, program: Program, instruction: Instruction, step: _Step) -> int:
        assert self.world and instruction.edge is not None
        edge = program.edges[instruction.edge]
        held = {port: step.store[h] for port, h in instruction.inputs.items() if h in step.store}
        moved, received = move_rows(
            edge,
            list(instruction.inputs),
            held,
            self.world,
            self.peers[_ranks(edge.source_mesh, edge.target_mesh)],
        )
        step.store.update({instruction.outputs[port]: rows for port, rows in moved.items()})
        return received

    def _weights(self, program: Program, instruction: Instruction) -> int:
        assert self.world and instruction.edge is not None
        edge = program.edges[instruction.edge]
        reader, trainer = self.plan.node(edge.target), self.plan.node(edge.source)
        assert reader.model
        source, target = self.instances.weights(trainer), self.instances.weights(reader)
        dtype = TORCH_DTYPES[self.plan.graph.model(reader.model).dtype]
        peers = self.peers[_ranks(edge.source_mesh, edge.target_mesh)]
        return move_weights(edge, self.plan.shapes[reader.model], source, target, dtype, self.world, peers)

    def _export(self, name: str, folder: Path) -> Report:
        assert self.world
        trainer = self.plan.node(self.plan.graph.trainers(name)[0].name)
        export_model(self.plan, trainer, self.instances.weights(trainer), folder, self.world)
        return {}


def _token_makers(plan: Plan, evaluation: bool) -> frozenset[str]:
    """The nodes whose tokens count as the step's: rollouts, or without any, what is trained on."""
    graph = plan.evaluation.graph if evaluation and plan.evaluation else plan.graph
    made = frozenset(n.name for n in graph.nodes if n.op == "generate")
    return made or frozenset(n.name for n in graph.nodes if n.op == "train")


def _ranks(*meshes: Mesh) -> tuple[int, ...]:
    return tuple(sorted({d for mesh in meshes for d in mesh.devices}))


def _peers(plan: Plan, group: Callable[[tuple[int, ...]], dist.ProcessGroup]) -> dict[tuple[int, ...], Peers]:
    """The process group of every mesh and of every edge of both programs, made in plan order."""
    programs = [p for p in (plan.step, plan.evaluation) if p]
    keys = [_ranks(n.mesh) for n in plan.nodes]
    keys += [_ranks(e.source_mesh, e.target_mesh) for p in programs for e in p.edges]
    return {key: Peers(key, group(key)) for key in dict.fromkeys(keys)}


def _guarded(action: Callable[[], Report], worker: Worker) -> Report:
    """The action's report, or a description of why it failed."""
    try:
        return action()
    except (Exception, SystemExit) as error:  # everything that user code can raise becomes data here
        return {"error": describe_error(error, worker.now), "time": time.time()}


def describe_error(error: BaseException, node: str) -> Report:
    """Plain data of an exception: enough for the controller to name the root cause."""
    if isinstance(error, HflowError):
        first = error.diagnostics[0]
        return {"code": first.code, "node": node, "message": first.message, "help": first.help, "trace": ""}
    if isinstance(error, NodeError):
        cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        return {"code": error.code, "node": error.node, "message": error.message, "help": "", "trace": cause}
    return {
        "code": "aborted" if isinstance(error, Aborted) else "HF401",
        "node": node,
        "message": f"{type(error).__name__}: {error}",
        "help": "",
        "trace": "".join(traceback.format_exception(error)),
    }
