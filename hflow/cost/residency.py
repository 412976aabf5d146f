"""What a model keeps in memory: one account for the planner, for what it says when nothing fits, for the
check of a plan, and for hosts.

An *instance* is one copy of a model's weights on a mesh. Of each device it keeps something `always` and maybe
more `in_use`: a trained model its gradients and optimizer, if it is offloaded (gradients are dropped, Adam's
state waits on the host); a frozen model its weights, if they wait there; a reader of a trained model its own
copy of the weights, unless they lie as the trainer's do, which it then uses. Of models that share a base the
frozen weights count where the model lies that has them; the others lie there in the same layout.

While a checkpoint is written, and steps go on, a copy of what it is made of lies on the host: of a trained
model, and of older weights that a reader keeps. It counts whenever there may be one, that is always, since no
graph or plan says how a run is kept. On CPUs it lies in the devices' own memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from hflow.cost.device import BYTES
from hflow.cost.resident_memory import (
    AVERAGE_BYTES,
    MOMENTS_BYTES,
    TRAINED_BYTES,
    average_bytes,
    awake_bytes,
    optimizer_bytes,
    pinned_bytes,
    renewed_bytes,
    resident_bytes,
    snapshot_bytes,
)
from hflow.graph.ir import Model
from hflow.plan.cluster import Cluster
from hflow.plan.engine_registry import GenerationEngine, profile_of
from hflow.plan.frozen import ALL_TRAINED, TrainedWith
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.strategy import Strategy

OPTIMIZER_ELEMENT_BYTES = 4  # of the optimizer's state
Use = Literal["train", "read", "frozen"]  # trains a model, reads one that is trained, all else


class LabelledBytes(NamedTuple):
    label: str
    size: int


NOTHING = LabelledBytes("weights", 0)
SERVED = "weights for its server"  # with which it is started again


@dataclass(frozen=True)
class OwnCopy:
    """Bytes of a reader's own copy of weights: `staying` all the time, or `passing`, while its node runs.

    `donated`: bytes of the trainer's weights that are gone while that node works; while weights move, they
    are there too.
    """

    staying: int = 0
    passing: int = 0
    donated: int = 0

    def with_node(self, need: int) -> int:
        """The most that is there for a node that needs so many bytes, less what stays of its model."""
        return self.staying + self.passing + max(need - self.donated, 0)

    def limit(self, free: int) -> int:
        """What a node may need at most where `free` bytes are left by all that stays; negative if the copy
        does not fit."""
        return free - self.passing + self.donated if free >= self.passing else -1


SHARED = OwnCopy()  # the trainer's weights


@dataclass(frozen=True)
class Residency:
    """Of one instance on each of its devices: what it keeps `always`, and `in_use` in all; `on_host` what
    waits in the host's memory, from where `loaded_bytes` come before a use. `weights`: bytes of these alone.

    `copy_bytes`: of a reader's own copy of the newest weights, where it has one. `awake`: a server that keeps
    weights and KV cache while other nodes run. `copy_stays`: only an adapter is renewed in it.
    `snapshot_bytes`: what a checkpoint copies of it to the host; on a CPU they are in `always` and `in_use`.
    All sizes are bytes per device. With offload `on_host` is rounded up as pinned blocks are; `loaded_bytes`
    is not.
    """

    always: LabelledBytes
    in_use: LabelledBytes
    weights: int
    on_host: LabelledBytes = NOTHING
    loaded_bytes: int = 0
    copy_bytes: int = 0
    awake: bool = False
    copy_stays: bool = False
    snapshot_bytes: int = 0

    def without(self, kept: LabelledBytes, size: int) -> LabelledBytes:
        """What is left of `kept` without so many bytes of the weights."""
        label = kept.label.removeprefix("weights, ") if size == self.weights else kept.label
        return LabelledBytes(label, kept.size - size)

    @property
    def swapped_bytes(self) -> int:
        """What comes before a use, from the host or made anew, and goes after it."""
        return self.in_use.size - self.always.size if self.loaded_bytes else 0

    def own_copy(self, nodes: int = 1, donated: int = 0) -> OwnCopy:
        """Of a reader whose weights lie otherwise than its trainer's; so many nodes run from its first use to
        its last. With several it stays, since what else comes in between is not known."""
        if nodes > 1 or self.awake or self.copy_stays:
            return OwnCopy(staying=self.copy_bytes)
        return OwnCopy(passing=self.copy_bytes, donated=donated)


def is_awake(engine: GenerationEngine, cluster: Cluster, shape: ModelShape, use: Use, lag: int) -> bool:
    """Whether a server keeps weights and KV cache while other nodes run. Of a model with an adapter it does:
    no renewal would bring the other weights back."""
    renewed = use == "read" and not lag and shape.adapter is None
    return bool(profile_of(engine).server) and not profile_of(engine).sleeps(cluster.device.platform, renewed)


def wakes(engine: GenerationEngine, cluster: Cluster, shape: ModelShape, lag: int) -> bool:
    """Whether the weights of a reader come to a server that sleeps."""
    return bool(profile_of(engine).server) and not is_awake(engine, cluster, shape, "read", lag)


def residency(
    model: Model,
    shape: ModelShape,
    mesh: Mesh,
    strategy: Strategy,
    cluster: Cluster,
    use: Use,
    lag: int = 0,
    *,
    evaluated: bool = False,
    offload: bool = False,
    tokens: int = 0,
    trained: TrainedWith = ALL_TRAINED,
    activations: int = 0,
) -> Residency:
    """Of an instance with weights `lag` updates old, `tokens` positions in the KV cache of its server.

    Args:
        evaluated: the evaluation reads the newest weights as well.
        offload: what trains the model, or the weights of a frozen one, waits on the host.
        trained: how, if it is.
        activations: bytes that a shared forward pass keeps; they count all the time, as if other nodes always
            ran between the two that share it.
    """
    how = strategy, cluster, use, lag, evaluated, offload, tokens, trained
    kept = _without_snapshot(model, shape, mesh, *how)
    size = _snapshot_bytes(model, shape, mesh, use, lag, trained, strategy.vpp)
    if size and cluster.device.platform == "cpu":
        kept = _with(kept, "snapshot", size)
    if use == "train" and trained.sent:
        sent = trained.sent * renewed_bytes(shape, model.weight_dtype, mesh, strategy)
        kept = _with(kept, "weights sent last", sent)
    if activations:
        kept = _with(kept, "activations", activations)
    return replace(kept, snapshot_bytes=size)


def evaluated_residency(
    model: Model, shape: ModelShape, mesh: Mesh, strategy: Strategy, cluster: Cluster
) -> Residency:
    """Of the newest weights, while a server evaluates them that samples with older ones: the host's copy."""
    size = renewed_bytes(shape, model.weight_dtype, mesh, strategy)
    copy = LabelledBytes("newest weights for its server", size)
    if cluster.device.platform == "cpu":
        return Residency(NOTHING, copy, size)
    return Residency(NOTHING, NOTHING, size, on_host=copy)


def _snapshot_bytes(
    model: Model, shape: ModelShape, mesh: Mesh, use: Use, lag: int, trained: TrainedWith, vpp: int
) -> int:
    """A model that takes over an average is as its trainer's checkpoint says."""
    if use != "train":
        is_older = lag or (model.refresh and not model.refresh.is_average)
        return snapshot_bytes(
            shape, mesh, BYTES[model.weight_dtype] if is_older else 0
        )  # without what is frozen
    if shape.adapter:  # what is frozen is in the model's folder
        return snapshot_bytes(shape, mesh, TRAINED_BYTES, trained.freeze, vpp)
    per_parameter = TRAINED_BYTES + AVERAGE_BYTES * trained.averages
    if not trained.freeze:
        return snapshot_bytes(shape, mesh, per_parameter, vpp=vpp)
    moments = snapshot_bytes(shape, mesh, MOMENTS_BYTES, trained.freeze, vpp)
    return snapshot_bytes(shape, mesh, per_parameter - MOMENTS_BYTES, vpp=vpp) + moments


def _with(kept: Residency, label: str, size: int) -> Residency:
    """With something more, whether it is in use or not."""
    parts = (LabelledBytes(f"{part.label}, {label}", part.size + size) for part in (kept.always, kept.in_use))
    always, in_use = parts
    return replace(kept, always=always, in_use=in_use)


def _without_snapshot(
    model: Model,
    shape: ModelShape,
    mesh: Mesh,
    strategy: Strategy,
    cluster: Cluster,
    use: Use,
    lag: int,
    evaluated: bool,
    offload: bool,
    tokens: int,
    trained: TrainedWith,
) -> Residency:
    what = shape, model.weight_dtype, mesh
    weights = resident_bytes(*what, False, strategy)
    whole = LabelledBytes("weights", weights)
    if use == "train":
        averages, label = trained.averages * average_bytes(shape, mesh, strategy), ", averages"
        size = resident_bytes(*what, True, strategy, trained.freeze) + averages
        if trained.on_base:
            size, weights = size - weights, renewed_bytes(*what, strategy)
            size, whole = size + weights, LabelledBytes("own weights", weights)
        state = LabelledBytes(f"{whole.label}, gradients, Adam{label if averages else ''}", size)
        if not offload:
            return Residency(state, state, weights)
        moved = optimizer_bytes(*what, strategy, trained.freeze)
        adam = LabelledBytes("Adam", pinned_bytes(shape, moved, OPTIMIZER_ELEMENT_BYTES, mesh.tp))
        between = LabelledBytes(f"weights{label}", weights + averages) if averages else whole
        return Residency(between, state, weights, adam, moved)
    own = cluster.server_bytes if profile_of(strategy.engine).server else 0  # always there
    if is_awake(strategy.engine, cluster, shape, use, lag):
        changes = use == "read" or model.refresh is not None
        size = own + awake_bytes(*what, tokens, cluster.device.platform, changes, strategy)
        server = LabelledBytes("server", size)
        on_host = 0
        if changes and cluster.device.platform == "cuda":  # else it is in `size`
            on_host = renewed_bytes(*what, strategy)
        copy = LabelledBytes(SERVED, on_host)
        newest = 0
        if lag and evaluated and cluster.device.platform == "cpu":
            newest = renewed_bytes(*what, strategy)  # while it evaluates them, by `evaluated_residency`
        return Residency(server, server, weights, copy, copy_bytes=newest, awake=True)
    if lag:
        older = LabelledBytes("older weights", weights)
        return Residency(older, older, weights, copy_bytes=weights if evaluated else 0)
    if use == "read" and profile_of(strategy.engine).server:
        asleep, serving = LabelledBytes("server", own), LabelledBytes("server, weights", own + weights)
        return Residency(asleep, serving, weights, LabelledBytes(SERVED, weights), copy_bytes=weights)
    if use == "read":
        return Residency(NOTHING, whole, weights, copy_bytes=weights, copy_stays=shape.adapter is not None)
    if trained.on_base:
        weights = renewed_bytes(*what, strategy)
        own_weights = LabelledBytes("own weights", weights)
        return Residency(own_weights, own_weights, weights)
    pinned = LabelledBytes("weights", pinned_bytes(shape, weights, BYTES[model.weight_dtype], mesh.tp))
    return (
        Residency(NOTHING, whole, weights, pinned, weights) if offload else Residency(whole, whole, weights)
    )
