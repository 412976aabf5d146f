"""Walk through a program: what one worker does in a step, and what it remembers between steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from hflow.graph.infer.kinds.generate import VERSIONS
from hflow.graph.infer.regions import sample_age
from hflow.graph.ir import Node, step_node
from hflow.graph.types import ValueType
from hflow.plan.layout import Layout, Range
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.plan.ports import input_layout, is_replicated, output_layout, row_unit
from hflow.plan.program import (
    Activity,
    Await,
    Call,
    Carry,
    Free,
    Instruction,
    Loop,
    Offload,
    Onload,
    Recall,
    Release,
    SyncWeights,
    Transfer,
)
from hflow.plan.workload import token_makers
from hflow.runtime.engines.protocol import EngineCall, ModelEngine, Result
from hflow.runtime.rows import Rows
from hflow.runtime.worker.carried import initial_value
from hflow.runtime.worker.changed_weights import CHANGED_WEIGHTS
from hflow.runtime.worker.collector import Collector
from hflow.runtime.worker.models import Engines
from hflow.runtime.worker.peer_groups import PeerGroups
from hflow.runtime.worker.sample_parts import SampleParts
from hflow.runtime.worker.staleness import sampled, staleness
from hflow.runtime.worker.step_run import Begun, StepRun
from hflow.runtime.worker.streams import streams
from hflow.runtime.worker.transfer import Received, move_rows
from hflow.runtime.worker.weight_transfers import WeightTransfers
from hflow.runtime.worker.whereabouts import Place
from hflow.runtime.worker.worker_state import WorkerState
from hflow.runtime.worker.world import World

_Measured = Activity | Await  # what becomes an event of a run


class Interpreter:
    """Executes the programs of one plan. `now` names the node that runs, or what moves for it; `place` is the
    instruction, None outside programs."""

    def __init__(self, plan: Plan, world: World, engines: Engines):
        """Collective over the world: every rank makes all process groups."""
        self.plan, self.world, self.engines = plan, world, engines
        self.now = ""
        self.place: Place | None = None
        self._peers = PeerGroups(plan, world.group)
        self.weights = WeightTransfers(plan, world, engines, self._peers)
        self._streams = streams(plan.graph)
        self.state = WorkerState()

    def run(
        self, number: int, evaluation: bool, name: str = "", samples: SampleParts | None = None
    ) -> dict[str, Any]:
        """One step's program, or that of an evaluation (the one called `name`) after `number` steps: metrics,
        digests, events, tokens. `samples` gets the step's values."""
        program = self.plan.evaluating(name) if evaluation else self.plan.step
        step = StepRun(program, number, evaluation, name, samples=samples)
        self._walk(program.instructions, step)
        for weights in step.trained:
            weights.version += 1
        self.now, self.place = "", None
        return step.report()

    def _walk(self, instructions: Sequence[Instruction], step: StepRun, within: tuple[int, ...] = ()) -> None:
        """`within`: the loop and its round, of whose body they are."""
        for index, instruction in enumerate(instructions):
            if self.world.rank in instruction.devices:
                path = (*within, index)
                self.place = Place(step.evaluation, path, time.monotonic(), step.name)
                self._execute(instruction, step, path)

    def _execute(self, instruction: Instruction, step: StepRun, path: tuple[int, ...]) -> None:
        match instruction:
            case Free():
                for handle in instruction.handles:
                    step.store.pop(handle, None)
            case Recall():
                self._recall(instruction, step)
            case Carry():
                for port, handle in instruction.inputs.items():
                    if handle in step.store:  # of a score node, only the last stage has some
                        name = f"{instruction.node}.{port}"
                        self.state.carried.keep(name, step.store[handle], instruction.lag)
            case Loop():
                self._loop(instruction, step, path)
            case Release():
                self._release(instruction, step)
            case Call() if step.awaits(instruction.node):
                self._begin(instruction, step)
            case SyncWeights(every=every) if every and (step.number == 0 or step.number % every):
                pass
            case Call() | Await() | Transfer() | SyncWeights() | Onload() | Offload():
                self._timed(instruction, step)
            case _:
                assert_never(instruction)

    def _recall(self, instruction: Recall, step: StepRun) -> None:
        node, mesh = step.program.graph.node(instruction.node), self.plan.node(instruction.node).mesh
        for port, handle in instruction.outputs.items():
            initial = initial_value(node, port, mesh, self.world.rank, instruction.init)
            if initial is not None:
                name = f"{step_node(instruction.node)}.{port}"
                step.store[handle] = self.state.carried.recall(name, instruction.lag, initial)

    def _timed(self, instruction: _Measured, step: StepRun) -> None:
        self.now, started = instruction.node, time.time()
        moved, ended = self._run(instruction, step), time.time()
        if begun := step.begun.pop(instruction.node, None) if isinstance(instruction, Await) else None:
            started, ended = begun.start_s, begun.end_s or ended  # not the wait for its weights
        kind, name = step.program.kind_and_name(instruction)
        event = {"kind": kind, "name": name, "device": self.world.rank, "step": step.number}
        event |= {"bytes": moved.values, "told_bytes": moved.told}
        step.events.append({**event, "start_s": started, "end_s": ended})

    def _run(self, instruction: _Measured, step: StepRun) -> Received:
        match instruction:
            case Call():
                inputs = {port: step.store[handle] for port, handle in instruction.inputs.items()}
                return self._call(instruction, step, inputs)
            case Await():
                return self._call(instruction, step, step.begun[instruction.node].inputs)
            case Transfer():
                return self._transfer(instruction, step)
            case SyncWeights():
                return self._weights(instruction, step)
            case Onload():
                return Received(self._model(instruction, step).onload())
            case Offload():
                return Received(self._model(instruction, step).offload())
            case _:
                assert_never(instruction)

    def _release(self, instruction: Release, step: StepRun) -> None:
        """Drop the reader's copy; if its trainer donated its memory, the trainer first copies its values
        back."""
        copy = self._model(instruction, step).weights
        edge = step.program.donating_edge(instruction.node) if instruction.donates else None
        if edge and (donor := self.weights.source(edge)):
            donor.take_back(copy)
        copy.release()

    def _loop(self, loop: Loop, step: StepRun, path: tuple[int, ...]) -> None:
        """Rounds until the region has its rows, with what earlier steps have left; then they are put into the
        store."""
        graph, name = step.program.graph, loop.node
        region, left = graph.region(name), self.state.surplus.get(name)
        before = left.younger(region.max_age - sample_age(graph.inside(name))) if left else None
        collector = Collector(graph.node(name), region, before)
        step.collectors[name] = collector
        while not collector.done:
            self._walk(loop.body, step, (*path, collector.rounds))
            self.state.rounds[name] += 1
        collected = collector.collected()
        for port, rows in collected.items():
            step.store[loop.outputs[port]] = rows
        if step.samples:
            step.samples.take(name, collected)
        if region.max_age:
            self.state.surplus[name] = collector.surplus()
        if self.world.rank == loop.devices[0]:
            waiting = collector.waiting
            share = float(collector.kept - waiting), float(collector.drawn - waiting)
            metrics = {"rounds": (float(collector.rounds), 1.0), "kept": share}
            if region.max_age:
                dropped = (len(left) if left else 0) - waiting
                metrics |= {"waiting": (float(waiting), 1.0), "dropped": (float(dropped), 1.0)}
            step.measure(name, Result(metrics=metrics))

    def _model(self, instruction: Instruction, step: StepRun) -> ModelEngine:
        node = step.program.graph.node(instruction.node)
        return self.engines.model(node, self.plan.node(node.name))

    def _begin(self, instruction: Call, step: StepRun) -> None:
        node = step.program.graph.node(instruction.node)
        plan, engine = self.plan.node(node.name), self._model(instruction, step)
        inputs = {port: step.store[handle] for port, handle in instruction.inputs.items()}
        self.now = node.name
        step.begun[node.name] = Begun(inputs, time.time())
        engine.begin(self._describe(node, plan, step), inputs)

    def _call(self, instruction: Call | Await, step: StepRun, inputs: Mapping[str, Rows]) -> Received:
        node = step.program.graph.node(instruction.node)
        if node.op == "repeat":
            step.collectors[node.name].add(inputs)
            return Received()
        plan, rank = self.plan.node(node.name), self.world.rank
        result = self._run_node(node, plan, step, inputs)
        if begun := step.begun.get(node.name):
            begun.end_s = result.end_s
        for output in node.outputs:
            if rank in output_layout(node, plan.mesh, output.type).boxes((output.type.rows,)):
                step.store[instruction.outputs[output.port]] = result.outputs[output.port]
        if step.samples and node.region not in step.collectors:
            step.samples.take(node.name, result.outputs, result.numbers)
        at = plan.mesh.coordinates(rank)
        first = at["tp"] == at["pp"] == at.get("cp", 0) == 0
        speaks = first and (at["dp"] == 0 or not is_replicated(node))
        if speaks or plan.model:
            step.measure(node.name, result)
        if speaks:
            step.count_lengths(node, result)
        if speaks and node in token_makers(step.program.graph):
            step.tokens += len((result.outputs if node.op == "generate" else inputs)["tokens"].values)
        return Received()

    def _run_node(self, node: Node, plan: NodePlan, step: StepRun, inputs: Mapping[str, Rows]) -> Result:
        """Texts are dated when they are sampled, and their age is checked before they are learned from."""
        call, engine = self._describe(node, plan, step), self.engines.of(node, plan)
        if node.op not in ("generate", "train"):
            return engine.run(call, inputs)
        weights = self.engines.model(node, plan).weights
        if node.op == "train":
            ages = staleness(step.program.graph, node, inputs["tokens"], weights.version)
            step.trained.add(weights)
            result = engine.run(call, inputs)
            return replace(result, metrics={**result.metrics, "staleness": (float(ages.sum()), len(ages))})
        result = engine.run(call, inputs)
        of_tokens = result.outputs.get(VERSIONS)
        texts = sampled(result.outputs["tokens"], weights.version, inputs.values(), of_tokens)
        return replace(result, outputs={**result.outputs, "tokens": texts})

    def _describe(self, node: Node, plan: NodePlan, step: StepRun) -> EngineCall:
        types = [v.type for v in (*(() if node.op == "data" else node.inputs), *node.outputs)]
        type_ = next((t for t in types if not t.scalar), types[0])
        layout = output_layout if node.op == "data" else input_layout
        start, stop = self._rows_here(layout(node, plan.mesh, type_), type_)
        unit = row_unit(type_) if node.op == "data" else 1
        in_region = node.region in step.collectors
        number = self.state.rounds[node.region] if in_region else step.number
        stream = self._streams.get(node.name, 0)
        share = start // unit, (stop - start) // unit
        graph = self.plan.graph
        made = None
        if node.op == "generate":
            texts = node.type_of("tokens")
            made = self._rows_here(output_layout(node, plan.mesh, texts), texts)
        return EngineCall(node, plan, *share, graph.seed, number, step.evaluation, stream, graph.steps, made)

    def _rows_here(self, layout: Layout, type_: ValueType) -> Range:
        return layout.boxes((type_.rows,))[self.world.rank][0]

    def _transfer(self, instruction: Transfer, step: StepRun) -> Received:
        edge = step.program.data_edge(instruction)
        held = {port: step.store[h] for port, h in instruction.inputs.items() if h in step.store}
        peers = self._peers.of(edge.source_mesh, edge.target_mesh)
        moved, received = move_rows(edge, list(instruction.inputs), held, self.world, peers)
        step.store.update({instruction.outputs[port]: rows for port, rows in moved.items()})
        return received

    def _weights(self, instruction: SyncWeights, step: StepRun) -> Received:
        received = self.weights.send(instruction, step.program, step.number)
        if changed := self.weights.changed(instruction, step.program):
            edge = step.program.weight_edge(instruction)
            step.measure(edge.target, Result(metrics={CHANGED_WEIGHTS: changed}))
        return received
