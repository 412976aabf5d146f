"""One worker per device: it keeps its part of the program, its models and its rows, and walks a step.

A plain class: the controller's Ray actor wraps it, and ``--workers inline`` and tests use it as it is.
Failures leave it as data (`failure`), never as exceptions: Ray would lose their cause.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from hflow.diagnostics import Span
from hflow.plan.digests import check_models
from hflow.plan.plan import Plan
from hflow.plan.replicas import Instance
from hflow.runtime.checkpoint.reader import CheckpointReader
from hflow.runtime.engines.implementation import implementation
from hflow.runtime.engines.python.engine import apart
from hflow.runtime.engines.python.function_process import FunctionProcess
from hflow.runtime.positions import check_positions
from hflow.runtime.samples.parts import SampleRequest
from hflow.runtime.worker.checkpoint import capture, restore
from hflow.runtime.worker.checkpoint_writer import CheckpointWriter
from hflow.runtime.worker.export import export_model
from hflow.runtime.worker.failure import failure_of
from hflow.runtime.worker.folder_problem import folder_problem
from hflow.runtime.worker.interpreter import Interpreter
from hflow.runtime.worker.models import Engines, build_engines
from hflow.runtime.worker.sample_parts import SampleParts
from hflow.runtime.worker.whereabouts import Whereabouts
from hflow.runtime.worker.world import World

Report = dict[str, Any]


class Worker:
    """Every call returns a report; one with an entry `error` (a `Failure`) tells why it failed.

    `isolates`: users' functions run in a process of their own, which stays until the worker ends.
    """

    def __init__(self, device: str = "cpu", isolates: bool = False):
        self.device = torch.device(device)
        self._isolates = isolates
        self._functions: FunctionProcess | None = None
        self.world: World | None = None
        self.plan: Plan | None = None
        self.interpreter: Interpreter | None = None
        self._writer: CheckpointWriter | None = None
        self._loading = ""
        self._present = (0, "", time.monotonic())  # call, its method, since when: see `Whereabouts`

    def leave(self) -> Report:
        """Leave the present world. All of its workers must do so at about the same time: one that gave up a
        transfer is held up until the others have closed their ends."""
        return self._guarded("leave", self._leave, number=0)

    def join(self, store: Store, generation: int, rank: int, size: int, secret: bytes = b"") -> Report:
        """Leave the present world, if any, and enter generation `generation` of it as `rank` of `size`. Each
        generation has another `secret` (`World.join`)."""
        return self._guarded("join", lambda: self._join(store, generation, rank, size, secret))

    def load(self, plan: Plan, resumed: str = "") -> Report:
        """Build the models of `plan` that live here and open its data. Collective: every rank makes all
        process groups. The entry `import_s` says for how long engines were imported, once in a process.

        Args:
            resumed: the folder of the checkpoint to go on from; empty to begin.
        """
        return self._guarded("load", lambda: self._load(plan, resumed))

    def run(
        self, step: int, evaluation: bool = False, name: str = "", samples: SampleRequest | None = None
    ) -> Report:
        """Walk the step's program (or that of an evaluation, of the one called `name`) and report metrics,
        events and times. Where `samples` are asked for, the entry `samples` says whether this worker has
        written any."""
        return self._guarded("run", lambda: self._run(step, evaluation, name, samples))

    def checkpoint(self, step: int, folder: str) -> Report:
        """Copy this worker's part of the state after `step` steps, and begin to write it. Not collective.
        What was written is in the entry `written` of this report and of later ones."""
        return self._guarded("checkpoint", lambda: self._checkpoint(step, Path(folder)))

    def end_checkpoint(self) -> Report:
        """Wait until what `checkpoint` began is written."""
        return self._guarded("end_checkpoint", self._end_checkpoint)

    def export(self, model: str, folder: str) -> Report:
        """Gather a trained model on one worker, which writes it to `folder` in HF format. Collective."""
        return self._guarded("export", lambda: self._export(model, Path(folder)))

    def look_for(self, mark: str) -> Report:
        """What is wrong with a file's folder, in the entry `problem`; empty where the file is there, and
        others can be made beside it."""
        return self._guarded("look_for", lambda: {"problem": folder_problem(Path(mark))})

    def abort(self) -> None:
        """Give up transfers under way (called from another thread)."""
        if self.world:
            self.world.abort()

    def where(self) -> str:
        """What runs now, for the progress line."""
        return self._loading or (self.interpreter.now if self.interpreter else "")

    def whereabouts(self) -> Whereabouts:
        """What it does, and since when (called from another thread)."""
        (call, method, since), now = self._present, time.monotonic()
        place = self.interpreter.place if self.interpreter and method == "run" else None
        if place is None:
            return Whereabouts(call, method, False, (), now - since, self._loading)
        seconds = now - max(since, place.since)
        return Whereabouts(call, method, place.evaluation, place.path, seconds, "", place.name)

    def function_stack(self) -> str:
        """Where users' functions are, in their process (called from another thread)."""
        stack = self._functions.stack() if self._functions else ""
        return f"\nprocess of functions:\n{stack}\n" if stack else ""

    def end_servers(self) -> None:
        """End the processes that this one has started (called from another thread, too)."""
        self._end_engines()
        if self._functions:
            self._functions.end()

    def close(self) -> None:
        self._leave()
        self.end_servers()

    def _end_engines(self) -> None:
        if self.interpreter:
            self.interpreter.engines.close()

    def _leave(self) -> Report:
        self._end_engines()
        self._unload()
        if self.world:
            self.world.close()
            self.world = None
        return {}

    def _join(self, store: Store, generation: int, rank: int, size: int, secret: bytes) -> Report:
        self._leave()
        own = PrefixStore(f"world{generation}", store)
        self.world = World.join(own, rank, size, self.device, secret)
        torch.set_num_threads(len(self.world.cores[rank]))
        return {}

    def _load(self, plan: Plan, resumed: str) -> Report:
        assert self.world
        self._unload()
        check_models(plan.graph, plan.digests)  # each host may have a folder of its own
        self.plan = plan
        began = time.perf_counter()
        for engine in {node.engine for node in plan.all_nodes if node.model}:
            implementation(engine)
        import_s = time.perf_counter() - began
        engines = build_engines(plan, self.world, self._tell, self._process_for(plan, self.world))
        self._loading = ""
        self.interpreter = Interpreter(plan, self.world, engines)
        self._writer = CheckpointWriter(self.world.rank)
        if resumed:
            self._restore(self.interpreter, Path(resumed))
        self._open_data(plan, engines, self.world.rank)
        return {"import_s": import_s}

    def _process_for(self, plan: Plan, world: World) -> FunctionProcess | None:
        """Where users' functions of `plan` run, if some run here and not in this process: the process that is
        there, or a new one, which gets ready while models are built."""
        nodes = [n for p in plan.programs for n in p.graph.nodes if apart(n)]
        own = [n for n in nodes if world.rank in plan.node(n.name).mesh.devices]
        here = dict.fromkeys(reference for node in own for reference in apart(node))
        if not (here and self._isolates):
            return None
        if self._functions and self._functions.alive:
            self._functions.stopped = world.aborted
        else:
            self._functions = FunctionProcess(list(here), world.aborted)
        return self._functions

    def _restore(self, interpreter: Interpreter, folder: Path) -> None:
        self._loading = f"reading {folder.name}"
        with closing(CheckpointReader(folder)) as reader:
            restore(interpreter, reader)
        self._loading = ""

    def _unload(self) -> None:
        """Models are in reference cycles, which keep memory and process groups until they are collected."""
        if self.plan is None:
            return
        if self._writer:
            self._writer.close()
        self.plan = self.interpreter = self._writer = None
        gc.collect()

    def _tell(self, text: str) -> None:
        self._loading = text

    def _open_data(self, plan: Plan, engines: Engines, rank: int) -> None:
        """Read all data before the first step, of those that are streamed the first, so that bad data end the
        run at once. Nothing collective comes after it: the other ranks do not wait for one that fails
        here."""
        named = (node for evaluation in plan.evaluations for node in evaluation.program.graph.nodes)
        for node in (n for n in (*plan.graph.nodes, *named) if n.op == "data"):
            if rank in plan.node(node.name).mesh.devices:
                self._loading = node.name
                engines.python.open(node).check(partial(check_positions, plan, node))
        self._loading = ""

    def _run(self, number: int, evaluation: bool, name: str, samples: SampleRequest | None) -> Report:
        assert self.plan and self.world and self.interpreter
        if samples is None:
            return self.interpreter.run(number, evaluation, name) | self._written() | self._output()
        parts = SampleParts(self.plan, self.world.rank, samples.rows)
        report = self.interpreter.run(number, evaluation, name, parts)
        has_written = parts.write(Path(samples.folder), self.interpreter.engines.python.tokenizer)
        return report | self._written() | self._output() | {"samples": has_written}

    def _checkpoint(self, step: int, folder: Path) -> Report:
        assert self.interpreter and self._writer
        began = time.perf_counter()
        self._writer.wait()
        waited = time.perf_counter() - began
        self._writer.begin(step, folder, capture(self.interpreter))
        return {"stall_s": time.perf_counter() - began, "waited_s": waited} | self._written()

    def _end_checkpoint(self) -> Report:
        assert self._writer
        self._writer.wait()
        return self._written()

    def _written(self) -> Report:
        """The parts of checkpoints that were written meanwhile."""
        return {"written": self._writer.collect() if self._writer else []}

    def _output(self) -> Report:
        """What users' functions wrote meanwhile, if anything."""
        lines, left_out = self._functions.written.take() if self._functions else ([], 0)
        rank = self.world.rank if self.world else 0
        return {"output": {"rank": rank, "lines": lines, "left_out": left_out}} if lines else {}

    def _export(self, name: str, folder: Path) -> Report:
        assert self.world and self.plan and self.interpreter
        trainer = self.plan.node(self.plan.graph.trainers(name)[0].name)
        weights = self.interpreter.engines.weights(Instance(name, trainer.sharding))
        export_model(self.plan, name, weights, trainer.sharding, folder, self.world)
        return {}

    def _guarded(self, method: str, action: Callable[[], Report], number: int | None = None) -> Report:
        """The action's report, or a description of why it failed. `number`: of the call, if not the next."""
        call = self._present[0] + 1 if number is None else number
        self._present = call, method, time.monotonic()
        try:
            return action()
        except (Exception, SystemExit) as error:  # everything that user code can raise becomes data here
            cause = self.world.explain(error) if self.world else error
            return {"error": failure_of(cause, self.where(), self._span)}
        finally:
            self._present = call, "", time.monotonic()

    def _span(self, node: str) -> Span | None:
        """Where the graph file says what failed."""
        nodes = self.plan.graph.nodes if self.plan else ()
        return next((n.span for n in nodes if n.name == node), None)
