"""What a plan is worth saying about: where memory is scarce, what the step waits for, who waits, and what
lies in the host's memory. Each remark is a label and a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise

from hflow import units
from hflow.compiler.explain.unused_devices import undivided
from hflow.compiler.shared_forward import sharing_of
from hflow.cost.device import peak_flops
from hflow.cost.host_memory import alike_hosts, host_memory
from hflow.cost.instances import kept_activations
from hflow.graph.adapter import StoredAdapter
from hflow.graph.ir import Model
from hflow.plan.cluster import Cluster
from hflow.plan.engine_registry import profile_of
from hflow.plan.frozen import trained_share
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import DeviceMemory, Plan
from hflow.plan.program import Activity, Call, Offload, Onload
from hflow.schedule.critical_path import critical_path, idle
from hflow.schedule.timed_span import steady_spans
from hflow.view.terminal.evaluations import evaluations
from hflow.view.timeline import Track, steady_tracks
from hflow.view.words import deed

Remark = tuple[str, str]
MUCH_FASTER = 2  # products in bf16 than in f32, from which this is told
IDLE = 0.10  # devices that wait for a larger part of the step are named
WORTH = 0.01  # moves that take a smaller part of the step are left out of the path


def remarks(plan: Plan) -> list[Remark]:
    memory = [("peak", peak_text(max(plan.memory, key=_filled)))] if plan.memory else []
    path = [("path", " -> ".join(path_names(plan)))]
    notes = _unproven(plan), _in_flight(plan), _slow_products(plan), _unused(plan), _waits(plan)
    return [
        *memory,
        *_hosts(plan),
        *path,
        *_engines(plan),
        *evaluations(plan),
        *_offloads(plan),
        *_adapters(plan),
        *_shared_forward(plan),
        *chain(*notes),
    ]


def peak_text(memory: DeviceMemory) -> str:
    """``72.1 GB of 80.0 GB on device 0-7, in rollout (actor weights 22.9 GB + ...)``."""
    made_of = _made_of(memory.parts)
    of = f"{units.size(memory.peak_bytes)} of {units.size(memory.capacity_bytes)}"
    during = f", in {memory.node}" if memory.node else ""
    where = f"on device {units.short_devices(memory.devices)}"
    return f"{of} {where}{during}" + (f" ({made_of})" if made_of else "")


def host_text(hosts: Sequence[int], parts: Mapping[str, int], cluster: Cluster) -> str:
    """``226 GB of 512 GB on host 0-1 (actor Adam 142 GB + actor snapshot 84.0 GB)``."""
    limit = cluster.host_memory_bytes
    of = "" if limit is None else f" of {units.size(limit)}"
    where = f"on host {units.short_devices(hosts)}"
    return f"{units.size(sum(parts.values()))}{of} {where} ({_made_of(parts)})"


def _hosts(plan: Plan) -> Iterator[Remark]:
    """The fullest."""
    hosts = alike_hosts(host_memory(plan.graphs, plan.shapes, plan.cluster, plan.all_nodes))
    if hosts:
        numbers, parts = max(hosts, key=lambda found: sum(found[1].values()))
        yield "host", host_text(numbers, parts, plan.cluster)


def _made_of(parts: Mapping[str, int]) -> str:
    """The largest first."""
    ordered = sorted(parts.items(), key=lambda part: (-part[1], part[0]))
    return " + ".join(f"{name} {units.size(value)}" for name, value in ordered if value)


def _filled(memory: DeviceMemory) -> float:
    return memory.peak_bytes / memory.capacity_bytes


def path_names(plan: Plan) -> tuple[str, ...]:
    """The nodes that make the step as long as it is, each waiting for the one before, and the moves between
    them that take at least 1 % of it, with their time."""
    found = critical_path(plan.step)
    first = min(range(len(found)), key=lambda n: found[n].path, default=0)
    least_s = WORTH * plan.step_time_s
    names: list[str] = []
    for span in (*found[first:], *found[:first]):
        name = deed(plan.step, span.instruction)
        if isinstance(span.instruction, Call):
            names.append(name)
        elif span.time_s >= least_s:
            names.append(f"[{name}, {units.seconds(span.time_s)}]")
    return tuple(dict.fromkeys(names))


def idle_fraction(plan: Plan) -> float:
    """The part of all devices' time in which they neither compute nor move anything."""
    shares = idle(plan.step)
    num_devices = sum(map(len, shares)) or 1
    return sum(len(devices) * share for devices, share in shares.items()) / num_devices


def offload_seconds(plan: Plan, node: str) -> float:
    """What a node's onloads and offloads take in a step, in all rounds."""
    return sum(s.time_s for s in steady_spans(plan.step) if _swaps(s.instruction, node))


def _swaps(instruction: Activity, node: str) -> bool:
    return isinstance(instruction, Onload | Offload) and instruction.node == node


def _offloads(plan: Plan) -> Iterator[Remark]:
    for node in (n for n in plan.nodes if n.offload):
        took = f"{units.seconds(offload_seconds(plan, node.node))} per step"
        yield "offload", f"{node.node}: {_left_at_host(node)} in the host's memory, {took}"


def _left_at_host(node: NodePlan) -> str:
    if node.kind == "train":
        return f"the optimizer of {node.model} waits"
    return f"the weights of {node.model} wait"


def _adapters(plan: Plan) -> Iterator[Remark]:
    """What of a model is trained, and who scores with the rest."""
    for model in (m for m in plan.graph.models if m.adapter):
        if not plan.graph.trainers(model.name):
            yield "adapter", _frozen_adapter(plan, model)
            continue
        share = trained_share(plan.shapes[model.name], ())
        users = [n.name for n in plan.graph.nodes if n.model and n.model.base and n.model.model == model.name]
        base = f"; its base: {', '.join(users)}" if users else ""
        base += f"; all others are those of {model.base}, on the same memory" if model.base else ""
        yield "adapter", f"{model.name}: {100 * share:.2g} % of its parameters are trained{base}"


def _shared_forward(plan: Plan) -> Iterator[Remark]:
    """Who has a forward pass with whom, and what is kept between the two."""
    for node, trainer in sharing_of(plan).items():
        kept = units.size(kept_activations(plan.graph, plan.shapes, plan.node(trainer)))
        text = f"{node} and the first update of {trainer} have one pass; {kept} per device stay between them"
        yield "forward", text


def _frozen_adapter(plan: Plan, model: Model) -> str:
    adapter = plan.shapes[model.name].adapter
    assert adapter
    where = f" beside {model.base}'s base, on the same memory" if model.base else ""
    stored = f" from {model.adapter.path}" if isinstance(model.adapter, StoredAdapter) else ""
    return f"{model.name}: of rank {adapter.rank}{stored}{where}"


def _unproven(plan: Plan) -> Iterator[Remark]:
    """Why the plan is not proven to be the best."""
    search = plan.search
    if search.unsearched:
        missed = f"not all places of {', '.join(search.unsearched)} were searched"
        yield "note", f"not proven best: {missed} (to try one: --pin {search.try_pin})"


def _engines(plan: Plan) -> Iterator[Remark]:
    """The step with each of the engines that were tried."""
    for tried in plan.search.tried_engines:
        names = ", ".join(f"{node} on {profile_of(engine).title}" for node, engine in tried.engines)
        step = "" if tried.step_time_s is None else f"a step of {units.seconds(tried.step_time_s)}"
        yield "engine", f"{names}: {'; but '.join(filter(None, (step, tried.reason)))}"


def _in_flight(plan: Plan) -> Iterator[Remark]:
    for node in (n for n in plan.graph.nodes if n.in_flight):
        yield "note", f"weights reach {node.name} while it samples: its tokens depend on the clock"


def _slow_products(plan: Plan) -> Iterator[Remark]:
    """f32 is rarely what is wanted of a GPU, or of a CPU that has a matrix unit for bf16."""
    names = [model.name for model in plan.graph.models if model.dtype == "f32"]
    times = peak_flops(plan.cluster.device, "bf16") / peak_flops(plan.cluster.device, "f32")
    if names and times >= MUCH_FASTER:
        faster = f"with `dtype: bf16` products run {times:.0f} times as fast"
        yield "note", f"in f32: {', '.join(names)}; {faster}"


def _unused(plan: Plan) -> Iterator[Remark]:
    unused = sorted(set(plan.cluster.devices) - set(plan.devices))
    if unused:
        why = undivided(plan)
        reason = f", since no node has a layout on more devices ({why})" if why else ""
        yield "note", f"device {units.short_devices(unused)} has nothing to do{reason}"


def _waits(plan: Plan) -> Iterator[Remark]:
    tracks = steady_tracks(plan)
    for devices, share in idle(plan.step).items():
        if share <= IDLE:
            continue
        text = f"device {units.short_devices(devices)} is idle for {share:.0%} of the step"
        yield "note", "".join((text, *_reason(devices, tracks)))


def _reason(devices: Sequence[int], tracks: Sequence[Track]) -> Iterator[str]:
    """The node elsewhere that runs longest while `devices` are idle."""
    own = next((t for t in tracks if devices[0] in t.devices), None)
    gaps = list(_gaps(own, max(t.bars[-1].end_s for t in tracks))) if own else []
    meanwhile: dict[tuple[str, tuple[int, ...]], float] = {}
    for track in tracks:
        for bar in (b for b in track.bars if b.kind == "call"):
            at_once = sum(max(0.0, min(end, bar.end_s) - max(start, bar.start_s)) for start, end in gaps)
            key = bar.name, track.devices
            meanwhile[key] = meanwhile.get(key, 0.0) + at_once
    name, where = max(meanwhile, key=lambda key: meanwhile[key])
    if seconds := meanwhile[name, where]:
        yield f", {units.seconds(seconds)} of it while {name} runs on {units.short_devices(where)}"


def _gaps(track: Track, end_s: float) -> Iterator[tuple[float, float]]:
    """When nothing runs."""
    edges = [(0.0, 0.0), *((bar.start_s, bar.end_s) for bar in track.bars), (end_s, end_s)]
    yield from ((before, after) for (_, before), (after, _) in pairwise(edges) if after > before)
