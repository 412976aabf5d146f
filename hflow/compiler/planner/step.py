"""The price of a complete choice: its step as tasks on a time line.

The tasks are those of the program that `lower_edges` will write for it, in the same order and with the same
times: nodes, weight edges, transfers of rows. Edges are priced by `cost.redistribution`, without copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from hflow.compiler.candidates.node_groups import node_groups
from hflow.compiler.lowering import row_bytes
from hflow.compiler.order import node_order
from hflow.compiler.planner.assignments import Assignments, all_meshes, shardings
from hflow.compiler.state import Draft, WeightRead
from hflow.compiler.writer import value_name
from hflow.cost.redistribution import rows_s, weights_s
from hflow.graph.ir import Input, Node, Output
from hflow.graph.types import ValueType
from hflow.plan.layout import Layout, Mesh
from hflow.plan.ports import input_layout, output_layout
from hflow.plan.replicas import Instance, instance_of
from hflow.plan.workload import rounds
from hflow.schedule.list_scheduling import Task, arrange, makespan_s, period_s, starts

PYTHON_CALL_S = 1e-3  # a data or call node; measured times replace it in the run's table
Times = Mapping[str, float]  # of nodes with models, with what they load and unload


class StepModel:
    """Prices choices for one draft."""

    def __init__(self, draft: Draft):
        self.draft, self.graph = draft, draft.graph
        self.groups = node_groups(draft.graph, draft.engines, draft.evaluation_graph)
        self.group_of = {node.name: group.name for group in self.groups for node in group.nodes}
        self.order = node_order(draft.graph)
        self.rounds = {n.name: rounds(draft.graph, n) for n in draft.graph.nodes}
        self.inputs = {n.name: _together(n) for n in draft.graph.nodes}
        self._layouts: dict[tuple[str, Mesh, ValueType, bool], Layout] = {}
        self._known: dict[Layout, Layout] = {}
        self._covers: dict[tuple[Layout, Layout, int], bool] = {}

    def step_s(self, assignments: Assignments, times: Times) -> float:
        """Seconds of a step, if the nodes with models take `times`."""
        tasks = _Walk(self, assignments, times).walk()
        return period_s(tasks, arrange(tasks))

    def layout(self, node: Node, mesh: Mesh, value: Input | Output, produced: bool) -> Layout:
        """How `node`, running on `mesh`, makes or reads a value; equal layouts are one object."""
        key = (node.name, mesh, value.type, produced)
        found = self._layouts.get(key)
        if found is None:
            made = (output_layout if produced else input_layout)(node, mesh, value.type)
            found = self._layouts[key] = self._known.setdefault(made, made)
        return found

    def covers(self, have: Layout, want: Layout, rows: int) -> bool:
        """Whether every device has what it wants, in the very boxes that it wants."""
        if have is want:
            return True
        key = (have, want, rows)
        found = self._covers.get(key)
        if found is None:
            boxes = have.boxes((rows,))
            wanted = want.boxes((rows,))
            found = self._covers[key] = all(boxes.get(device) == box for device, box in wanted.items())
        return found


def _together(node: Node) -> tuple[tuple[Input, ...], ...]:
    """A node's inputs in groups that move as one: of one producer and age, laid out alike."""
    groups: dict[tuple[object, ...], list[Input]] = {}
    for value in node.inputs:
        sizes = tuple(f.size for f in value.type.dims[0].factors[1:]) if value.type.dims else ()
        key = (value.source.node, value.lag, value.init, value.type.rows, value.type.scalar, sizes)
        groups.setdefault(key, []).append(value)
    return tuple(tuple(values) for values in groups.values())


@dataclass
class _Walk:
    """One pass over the nodes in program order, which writes their tasks.

    `tasks`: those written so far; `at`: where each value lies and which task has put it there.
    """

    model: StepModel
    assignments: Assignments
    times: Times
    tasks: list[Task] = field(default_factory=list[Task])
    at: dict[str, list[tuple[Layout, int | None]]] = field(
        default_factory=dict[str, list[tuple[Layout, int | None]]]
    )
    renewed: dict[Instance, int] = field(default_factory=dict[Instance, int])
    readers: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  # of models, until trained
    trained: set[str] = field(default_factory=set[str])
    calls: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        model, assignments = self.model, self.assignments
        self.shardings = shardings(model.groups, assignments)
        placed = {node: self.shardings[group].mesh for node, group in model.group_of.items()}
        self.meshes = all_meshes(model.graph, placed)
        of_mesh = {self.shardings[g.name].mesh: assignments[g.name].resources for g in model.groups}
        self.resources = {name: of_mesh.get(mesh, ()) for name, mesh in self.meshes.items()}
        for node in (n for n in model.graph.nodes if n.op == "repeat"):
            inner = model.graph.inside(node.name)
            self.resources[node.name] = _union(*(self.resources[n.name] for n in inner))

    def walk(self) -> list[Task]:
        model = self.model
        loops = {n.name for n in model.order if n.op == "repeat"}
        self._move(e for e in model.draft.weight_edges if e.every)
        for node in (n for n in model.order if n.region not in loops):
            if node.op == "repeat":
                self._loop(node, [n for n in model.order if n.region == node.name])
                continue
            inputs = self._read(node)
            inputs |= {self.calls[first] for first in node.after if first in self.calls}
            self._weights_before(node, inputs)
            self._call(node, inputs)
        return self.tasks

    def _loop(self, region: Node, inner: list[Node]) -> None:
        """The rounds of a region as one task, which lasts until the last of them has ended."""
        outer, known, self.tasks, self.at = self.tasks, self.at, [], self._known_before()
        before = {task for places in known.values() for _, task in places if task is not None}
        for node in (*inner, replace(region, outputs=())):
            seconds = self.times.get(node.name, PYTHON_CALL_S)
            self._made(node, self._write(seconds, self.resources[node.name], self._read(node)))
        body, self.tasks, self.at = self.tasks, outer, known
        began = starts(body, arrange(body), self.model.rounds[region.name])
        seconds = max(makespan_s(body, each) for each in began)
        for node in inner:
            self._weights_before(node, before)
        needs = {*before, *(n for node in inner for n in self._weights_read(node))}
        number = self._write(seconds, self.resources[region.name], needs)
        for node in inner:
            self._has_read(node, number)
        self._made(region, number)

    def _call(self, node: Node, after: set[int]) -> None:
        seconds = self.times.get(node.name, PYTHON_CALL_S)
        if node.model and node.op == "train":
            after |= set(self.readers.pop(node.model.model, []))
        number = self._write(seconds, self.resources[node.name], after | self._weights_read(node))
        self.calls[node.name] = number
        self._has_read(node, number)
        self._made(node, self._await(node, number) if node.in_flight else number)

    def _await(self, node: Node, number: int) -> int:
        """The end of a node whose weights come in flight, after both."""
        self._move(e for e in self.model.draft.weight_edges if e.reader == node.name)
        renewed = self.renewed.get(instance_of(node, self.shardings[self.model.group_of[node.name]]), number)
        self.calls[node.name] = self._write(0.0, (), {number, renewed})
        return self.calls[node.name]

    def _made(self, node: Node, number: int) -> None:
        for output in node.outputs:
            layout = self.model.layout(node, self.meshes[node.name], output, True)
            self.at[f"{node.name}.{output.port}"] = [(layout, number)]

    def _has_read(self, node: Node, number: int) -> None:
        if node.model and node.op != "train":
            self.readers.setdefault(node.model.model, []).append(number)

    def _read(self, node: Node) -> set[int]:
        """Bring a node's inputs to where it reads them; the tasks that have written them."""
        model, after = self.model, set[int]()
        for values in model.inputs[node.name]:
            producer = model.graph.node(values[0].source.node)
            source = model.layout(producer, self.meshes[producer.name], values[0], True)
            target = model.layout(node, self.meshes[node.name], values[0], False)
            rows = values[0].type.rows
            sizes = {value_name(v): row_bytes(v.type) for v in values}
            for name in sizes:
                if values[0].lag:  # recalled where it was made
                    self.at.setdefault(name, [(source, None)])
            missing = [name for name in sizes if self._find(name, target, rows) is None]
            if missing:
                self._transfer(sizes, missing, rows, source, target, (producer.name, node.name))
            found = (self._find(name, target, rows) for name in sizes)
            after |= {task for places in found if places for task in places if task is not None}
        return after

    def _find(self, name: str, layout: Layout, rows: int) -> tuple[int | None] | None:
        """The task that has put `name` where `layout` wants it."""
        covers = self.model.covers
        return next(((task,) for have, task in self.at[name] if covers(have, layout, rows)), None)

    def _transfer(
        self,
        sizes: Mapping[str, int],
        missing: Sequence[str],
        rows: int,
        source: Layout,
        target: Layout,
        ends: tuple[str, str],
    ) -> None:
        width = sum(sizes[name] for name in missing)
        seconds = rows_s(rows, width, source, target, self.model.draft.cluster)
        makers = {task for name in missing for _, task in self.at[name][:1] if task is not None}
        number = self._write(seconds, _union(*(self.resources[end] for end in ends)), makers)
        for name in missing:
            self.at[name].append((target, number))

    def _known_before(self) -> dict[str, list[tuple[Layout, int | None]]]:
        """Where values lie when a loop begins."""
        return {name: [(layout, None) for layout, _ in places] for name, places in self.at.items()}

    def _weights_before(self, node: Node, inputs: Set[int]) -> None:
        """As `lower_edges` moves weights: the newest to a reader, once its inputs are there; before the first
        training of a model in a step, the present ones to the readers that are one update behind."""
        if node.model is None:
            return
        edges, name = self.model.draft.weight_edges, node.model.model
        if node.op != "train":
            newest = (e for e in edges if e.reader == node.name and not e.every and not node.model.lag)
            self._move(newest, inputs)
        elif name not in self.trained:
            self.trained.add(name)
            self._move(e for e in edges if e.model == name and e.lag)

    def _move(self, edges: Iterable[WeightRead], inputs: Set[int] = frozenset()) -> None:
        draft, group_of = self.model.draft, self.model.group_of
        for edge in edges:
            source, target = (self.shardings[group_of[name]] for name in (edge.trainer, edge.reader))
            reader = instance_of(draft.graph.node(edge.reader), target)
            trained = draft.graph.node(edge.trainer).model
            assert trained
            if reader in self.renewed or reader == Instance(trained.model, source):
                continue
            dtype = draft.graph.model(trained.model).dtype
            seconds = weights_s(draft.shapes[edge.model], dtype, source, target, draft.cluster)
            resources = _union(self.resources[edge.trainer], self.resources[edge.reader])
            after = {self.calls[edge.reader]} if reader.lag and edge.reader in self.calls else set(inputs)
            passing = not edge.every and not reader.lag
            number = self._write(seconds / max(1, edge.every), resources, after, passing)
            self.renewed[reader] = number
            self.readers.setdefault(trained.model, []).append(number)

    def _weights_read(self, node: Node) -> set[int]:
        """The task that has renewed the weights that a node reads in this step."""
        if not node.model or node.op == "train" or node.model.lag:
            return set()
        number = self.renewed.get(instance_of(node, self.shardings[self.model.group_of[node.name]]))
        return set() if number is None else {number}

    def _write(self, seconds: float, resources: tuple[int, ...], after: set[int], leads: bool = False) -> int:
        self.tasks.append(Task(seconds, resources, tuple(sorted(after)), leads))
        return len(self.tasks) - 1


def _union(*parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({resource for part in parts for resource in part}))
