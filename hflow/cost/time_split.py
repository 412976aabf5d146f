"""What the time of a node is spent on, and how much of the devices' peak its model makes use of.

The parts are found by taking one thing after the other away and pricing the node again: what ideal links save
is communication, what kernels without a least time save is latency, what ideal memory saves beyond that is
memory, and what ideal arithmetic saves beyond that is compute. So they add up to the node's time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hflow.cost.attention import seen_once
from hflow.cost.compute import node_time_s, train_passes_s
from hflow.cost.device import peak_flops
from hflow.cost.execution import Execution
from hflow.cost.passes import passes
from hflow.graph.ir import OpKind
from hflow.plan.cluster import Link
from hflow.plan.flops import forward_flops, head_parameters

IDEAL = 1e30  # per second; finite, lest anything become no number
IDEAL_LINK = Link(IDEAL, 0.0)


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of one execution. `bubble_s`: stages of a pipeline that wait for its first and last
    micro-batches, whatever they would do meanwhile."""

    compute_s: float
    memory_s: float
    communication_s: float
    latency_s: float
    bubble_s: float

    @property
    def total_s(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def time_split(op: OpKind, run: Execution) -> TimeSplit:
    """The parts of `node_time_s` of a generate, score or train node."""
    linked = replace(run, cluster=replace(run.cluster, intra_host=IDEAL_LINK, inter_host=IDEAL_LINK))
    started = _with_device(linked, layer_overhead_s=0.0, kernel_latency_s=0.0)
    streamed = _with_device(started, memory_bandwidth=IDEAL)
    computed = _with_device(streamed, flops=IDEAL)
    without = (linked, started, streamed, computed)
    whole_s, linked_s, started_s, streamed_s, left_s = (
        _time_s(op, each) - _bubble_s(op, each) for each in (run, *without)
    )
    return TimeSplit(
        compute_s=streamed_s - left_s,
        memory_s=started_s - streamed_s,
        communication_s=whole_s - linked_s,
        # What is left: the time that a server takes for each token, least times of layers that were measured.
        latency_s=linked_s - started_s + left_s,
        bubble_s=_bubble_s(op, run),
    )


def model_flops(op: OpKind, run: Execution) -> float:
    """FLOP that one execution needs, as Megatron-LM counts them for its MFU: a forward pass, of training
    three; nothing for recomputation, or for a forward pass that a score node has made. Of rows with the same
    prompt, in one update or score, the prompt counts once; logits are needed of responses, and attention to
    what is before a token."""
    work, shape = run.work, run.shape
    if op == "generate":
        prompts = work.rows / work.samples
        read = forward_flops(shape, prompts * work.mean_prompt, work.mean_prompt / 2)
        read -= 2 * head_parameters(shape) * prompts * (work.mean_prompt - 1)  # last positions have logits
        context = work.mean_prompt + work.mean_response / 2
        return read + forward_flops(shape, work.rows * work.mean_response, context)
    alike, updates = (work.alike_in_update, work.optimizer_steps) if op == "train" else (work.alike, 1)
    rows = work.rows_per_update if op == "train" else work.rows
    prompts = rows / alike
    read, answers = prompts * work.mean_prompt + rows * work.mean_response, rows * work.mean_response
    forward = forward_flops(shape, read, seen_once(work, rows, prompts) / read)
    forward -= 2 * head_parameters(shape) * (read - answers)
    return (3 * updates - run.strategy.share_forward if op == "train" else 1) * forward


def tokens(op: OpKind, run: Execution) -> float:
    """Of one execution: those that a generate node makes, and others read."""
    work = run.work
    if op == "generate":
        return work.rows * work.mean_response
    rows = work.optimizer_steps * work.rows_per_update if op == "train" else work.rows
    return rows * work.mean_sequence


def peak_of_mesh(run: Execution) -> float:
    """FLOP/s of all devices of the node's mesh, in the model's dtype."""
    return len(run.mesh.devices) * peak_flops(run.device, run.dtype)


def _time_s(op: OpKind, run: Execution) -> float:
    return node_time_s(
        op, run.shape, run.dtype, run.work, run.mesh, run.micro_batch, run.cluster, run.strategy
    )


def _bubble_s(op: OpKind, run: Execution) -> float:
    """Of m + (p - 1) / v slots (p - 1) / v. Parts of a wave of generation follow each other without end."""
    if op == "generate" or run.mesh.pp == 1:
        return 0.0
    slots = passes(run.work, run.mesh.dp, run.micro_batch, run.shape.head, True, op == "train").count
    waits = (run.mesh.pp - 1) / (run.strategy.vpp if op == "train" else 1)
    passing_s = run.work.optimizer_steps * train_passes_s(run) if op == "train" else _time_s(op, run)
    return passing_s * waits / (slots + waits)


def _with_device(run: Execution, **changed: float) -> Execution:
    return replace(run, cluster=replace(run.cluster, device=replace(run.cluster.device, **changed)))
