"""The candidates of one node group on one mesh: what stays on a device, what a node needs there, and for how
long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, isqrt
from typing import Literal

from hflow.compiler.candidates.node_groups import Candidate, ExecConfig, NodeGroup, ParetoFront
from hflow.compiler.candidates.row_splits import sequence_parallel_or_not, uncut
from hflow.compiler.pins import Pin
from hflow.cost.activation_memory import kv_cache_bytes
from hflow.cost.comm import host_transfer_s
from hflow.cost.compute import node_time_s
from hflow.cost.paged_cache import cache_tokens
from hflow.cost.residency import Residency, is_awake, residency
from hflow.cost.working_memory import kept_forward_bytes, working_bytes
from hflow.graph.ir import Model, Node, OpKind
from hflow.plan.cluster import Cluster
from hflow.plan.frozen import untrained_layers
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.sharding import spreads
from hflow.plan.strategy import Strategy
from hflow.plan.workload import Workload

RECOMPUTE: tuple[Literal["none", "full"], ...] = ("none", "full")
MOST_PASSES = 256  # all numbers of passes over up to 65,536 groups


@dataclass(frozen=True)
class Pricing:
    """Prices a node group; `pins`: those of its nodes."""

    group: NodeGroup
    model: Model
    shape: ModelShape
    pins: tuple[Pin, ...]
    cluster: Cluster

    def candidates(self, mesh: Mesh) -> list[Candidate]:
        """Those that fit into a device's memory and that no other on the same mesh beats in every respect."""
        if self.group.shares_forward:
            return _undominated([*self._sharing(mesh)])
        found: list[Candidate] = []
        for strategy in self._strategies(mesh):
            fronts = tuple(
                self._front(n, w, mesh, strategy) for n, w in zip(self.group.nodes, self.group.works)
            )
            if all(w.configs for w in fronts):
                found += self._resident_or_not(mesh, strategy, fronts)
        return _undominated(found)

    def refusal(self, mesh: Mesh) -> str:
        """Why the pins cannot be kept on `mesh`, whatever the memory; empty if they can."""
        for setting in ("zero", "ep", "etp", "offload", "sp", "vpp"):
            if len({getattr(pin, setting) for pin in self.pins} - {None}) > 1:
                return f"the pins disagree about {setting}"
        pinned = next((pin.devices for pin in self.pins if pin.devices), mesh.devices)
        placed = replace(mesh, devices=pinned) if len(pinned) == len(mesh.devices) else mesh
        if self.group.served and not all(map(self.cluster.is_even, placed.groups("tp"))):
            return "a server has as many ranks on each of its hosts, one host after the other"
        if not self.group.profile.offloads and any(pin.offload for pin in self.pins):
            return f"{'a server' if self.group.served else self.group.profile.title} is not offloaded"
        if self.group.shares_forward and any(pin.offload for pin in self.pins):
            return "a model whose forward pass is shared is not offloaded"
        if self.group.shares_forward and len({pin.micro for pin in self.pins} - {None}) > 1:
            return "the pins disagree about micro-batches, which are shared"
        works = {node.name: work for node, work in zip(self.group.nodes, self.group.works)}
        if reason := self._interleaving_refusal(mesh):
            return reason
        reasons = (self._split_refusal(p, mesh) or _micro_refusal(p, works[p.node], mesh) for p in self.pins)
        return next(filter(None, reasons), "")

    @property
    def _vpp(self) -> int:
        """Chunks of layers on each rank of pp. Only pins ask for several."""
        return max((pin.vpp for pin in self.pins if pin.vpp), default=1)

    def _interleaving_refusal(self, mesh: Mesh) -> str:
        """Megatron's schedule passes micro-batches on in sets of as many as there are stages."""
        vpp, layers = self._vpp, self.shape.num_layers
        if vpp == 1:
            return ""
        if mesh.pp == 1:
            return f"vpp{vpp} has no pipeline stages to interleave in pp1"
        if layers % (mesh.pp * vpp):
            return f"pp{mesh.pp} with vpp{vpp} does not divide {layers} layers"
        for node, work in zip(self.group.nodes, self.group.works):
            micro = next((p.micro for p in self.pins if p.node == node.name), None)
            share = _share(work, mesh)[0]
            number = ceil(share / micro) if micro else mesh.pp
            if number % mesh.pp:
                return f"micro{micro} makes {number} passes, no multiple of pp{mesh.pp} as vpp{vpp} needs"
            if not micro and not _micro_batches(work, mesh, mesh.pp):
                return f"{share} rows make no multiple of pp{mesh.pp} passes, as vpp{vpp} needs"
        return ""

    def _split_refusal(self, pin: Pin, mesh: Mesh) -> str:
        if pin.zero and mesh.copies == 1:
            return f"zero{pin.zero} has nothing to split over dp1"
        if pin.zero == 3 and mesh.cp > 1:
            return f"zero3 splits over dp alone: no cp{mesh.cp}"
        if pin.sp and mesh.tp == 1:
            return "sp has nothing to split over tp1"
        if pin.sp and (reason := uncut(self.group)):
            return f"{reason}: no sp"
        return self._expert_refusal(pin, mesh)

    def _expert_refusal(self, pin: Pin, mesh: Mesh) -> str:
        """Why its experts cannot be shared as `pin` says."""
        if pin.etp and pin.etp not in (1, mesh.tp):
            return f"etp{pin.etp} is neither 1 nor tp{mesh.tp}: tp cuts experts, or leaves them whole"
        whole = pin.etp == 1 and mesh.tp > 1
        if not whole and pin.ep in (None, 1):
            return ""
        text = f"ep{pin.ep}" if pin.ep else "etp1"
        if not self.shape.moe:
            return f"`{self.model.name}` has no experts for {text}"
        if pin.ep and self.shape.moe.num_experts % pin.ep:
            return f"ep{pin.ep} does not divide {self.shape.moe.num_experts} experts"
        if alone := self._never_shares_experts():
            return f"{self.group.profile.title} shares no experts between replicas that {alone}"
        if any(self._ways_of_experts(mesh)):
            return ""
        if whole:
            wanted = f"a multiple of tp{mesh.tp} that divides the {mesh.copies * mesh.tp} ranks of a stage"
            return f"{text} with experts that tp leaves whole: `ep` must be {wanted}, and the experts"
        spread = pin.ep and spreads(mesh, pin.ep, True)
        return f"{text} does not divide dp{mesh.dp}" + (", but with `etp1` it would do" if spread else "")

    def _never_shares_experts(self) -> str:
        """A kind of node in the group for which each replica has all experts; empty if there is none."""
        able = self.group.profile.expert_parallel
        return next((node.op for node in self.group.nodes if node.op not in able), "")

    def _strategies(self, mesh: Mesh) -> Iterator[Strategy]:
        """ZeRO-1 where there is anything to split; experts over ranks (`_ways_of_experts`); rows over tp, or
        not."""
        zeros: set[Literal[0, 1, 3]] = {p.zero for p in self.pins if p.zero is not None}
        if not zeros:
            zeros = {0, 1} if self.group.role == "train" and mesh.copies > 1 else {0}
        engine = self.group.engine
        sps = sequence_parallel_or_not(self.group, self.pins, mesh.tp)
        for ep, whole in self._ways_of_experts(mesh):
            for zero, sp in product(sorted(zeros), sps):
                yield Strategy(zero=zero, ep=ep, engine=engine, sp=sp, vpp=self._vpp, whole_experts=whole)

    def _ways_of_experts(self, mesh: Mesh) -> Iterator[tuple[int, bool]]:
        """Into how many parts experts are spread over ranks, and whether tp leaves them whole, for which only
        pins ask."""
        shared = self.shape.moe and not self._never_shares_experts()
        experts = self.shape.moe.num_experts if self.shape.moe and shared else 1
        parts = {p.ep for p in self.pins if p.ep} or range(1, min(experts, mesh.copies * mesh.tp) + 1)
        whole = mesh.tp > 1 and any(pin.etp == 1 for pin in self.pins)
        for ep in (ep for ep in parts if experts % ep == 0 and spreads(mesh, ep, whole)):
            yield ep, whole

    def _resident_or_not(
        self, mesh: Mesh, strategy: Strategy, fronts: tuple[ParetoFront, ...]
    ) -> Iterator[Candidate]:
        if is_awake(strategy.engine, self.cluster, self.shape, self.group.use, self.group.lag):
            yield from self._awake(mesh, strategy, fronts)
            return
        for offload in self._offloads(mesh, strategy):
            kept = self._kept(mesh, strategy, offload)
            ways = 2 if self.group.role == "train" else 1
            swap_s = host_transfer_s(kept.loaded_bytes, self.cluster) * ways if offload else 0.0
            more = tuple(_more(front, kept.swapped_bytes) for front in fronts)
            yield from self._fitting(_candidate(mesh, strategy, kept, swap_s, more))

    def _awake(self, mesh: Mesh, strategy: Strategy, fronts: tuple[ParetoFront, ...]) -> Iterator[Candidate]:
        """Of a server that keeps its KV cache while other nodes run: a candidate for each size of the
        cache."""
        for chosen in product(*(each.configs for each in fronts)):
            tokens = [
                cache_tokens(work, mesh.dp, config.micro_batch, strategy.engine)
                for config, work in zip(chosen, self.group.works)
            ]
            caches = (kv_cache_bytes(self.shape, self.model.weight_dtype, count, mesh) for count in tokens)
            rest = tuple(_more(ParetoFront((config,)), -cache) for config, cache in zip(chosen, caches))
            kept = self._kept(mesh, strategy, tokens=max(tokens))
            yield from self._fitting(_candidate(mesh, strategy, kept, 0.0, rest))

    def _sharing(self, mesh: Mesh) -> Iterator[Candidate]:
        """A score node and the training that has one forward pass with it, in one way for each strategy: in
        the micro-batches with which an update is fastest of those that fit beside all activations."""
        score, train = sorted(self.group.nodes, key=lambda node: node.op)
        of_score, of_train = (self.group.works[self.group.nodes.index(node)] for node in (score, train))
        asked = self._pin(score)
        for plain, recompute in product(self._strategies(mesh), self._recomputes(train)):
            strategy = replace(plain, recompute=recompute, share_forward=True)
            kept = self._kept(mesh, strategy, activations=self._kept_forward(of_train, mesh, strategy))
            front = self._front(train, of_train, mesh, strategy, asked.micro if asked else None)
            update = front.fastest(self._free(kept))
            if not update:
                continue
            micro = update.micro_batch
            scoring = self._front(score, of_score, mesh, strategy, micro).fastest(self._free(kept))
            if scoring and scoring.micro_batch == micro:
                configs = {"score": scoring, "train": update}
                fronts = tuple(ParetoFront((configs[node.op],)) for node in self.group.nodes)
                yield _candidate(mesh, strategy, kept, 0.0, fronts)

    def _free(self, kept: Residency) -> int:
        """Bytes of a device beside what stays there of the node group."""
        return self.cluster.device.usable_bytes - kept.always.size

    def _kept_forward(self, update: Workload, mesh: Mesh, strategy: Strategy) -> int:
        untrained = untrained_layers(self.shape, self.group.trained.freeze)
        return kept_forward_bytes(self.shape, self.model.weight_dtype, update, mesh, strategy, untrained)

    def _kept(
        self, mesh: Mesh, strategy: Strategy, offload: bool = False, tokens: int = 0, activations: int = 0
    ) -> Residency:
        group = self.group
        return residency(
            self.model, self.shape, mesh, strategy, self.cluster, group.use, group.lag,
            evaluated=group.evaluated, offload=offload, tokens=tokens, trained=group.trained,
            activations=activations,
        )  # fmt: skip

    def _offloads(self, mesh: Mesh, strategy: Strategy) -> Sequence[bool]:
        """Whether anything may wait on the host, which has room for what its devices would put there."""
        pinned = {p.offload for p in self.pins if p.offload is not None}
        if pinned and self.group.use != "read":
            return sorted(pinned)
        if self.group.role == "frozen" and self.model.base:  # too little to be worth it
            return (False,)
        if not (self.cluster.host_link and self.group.profile.offloads) or self.model.refresh:
            return (False,)
        kept = self._kept(mesh, strategy, offload=True)
        moved, there = kept.loaded_bytes, kept.loaded_bytes + kept.snapshot_bytes
        room, devices = self.cluster.host_memory_bytes, min(len(mesh.devices), self.cluster.devices_per_host)
        return (False, True) if moved and (room is None or there * devices <= room) else (False,)

    def _fitting(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate without the configurations that cannot fit."""
        limit = self._free(candidate.kept)
        fronts = tuple(
            ParetoFront(tuple(w for w in each.configs if w.need_bytes <= limit)) for each in candidate.fronts
        )
        if all(each.configs for each in fronts):
            yield replace(candidate, fronts=fronts)

    def _front(
        self, node: Node, work: Workload, mesh: Mesh, strategy: Strategy, micro: int | None = None
    ) -> ParetoFront:
        """Those with `micro` rows in a micro-batch, if that is given and not pinned."""
        pin = self._pin(node)
        strategies = (strategy,)
        if not strategy.share_forward:
            strategies = tuple(replace(strategy, recompute=how) for how in self._recomputes(node))
        micro = (pin.micro if pin else None) or micro
        untrained = untrained_layers(self.shape, self.group.trained.freeze) if node.op == "train" else 0
        return _front(
            node.op,
            self.shape,
            self.model.weight_dtype,
            work,
            mesh,
            strategies,
            micro,
            self.cluster,
            untrained,
        )

    def _recomputes(self, node: Node) -> tuple[Literal["none", "full"], ...]:
        pin = self._pin(node)
        ways = RECOMPUTE if node.op == "train" else RECOMPUTE[:1]
        if pin and pin.recompute is not None:
            return tuple(way for way in ways if pin.recompute == (way == "full"))
        return ways

    def _pin(self, node: Node) -> Pin | None:
        return next((pin for pin in self.pins if pin.node == node.name), None)


@lru_cache(maxsize=65536)  # models of one shape do the same work
def _front(
    op: OpKind,
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    strategies: tuple[Strategy, ...],
    micro: int | None,
    cluster: Cluster,
    untrained: int,
) -> ParetoFront:
    """Those that fit into a device's memory; of any micro-batch, unless one is given."""
    found: list[ExecConfig] = []
    multiple = mesh.pp if strategies[0].vpp > 1 else 1
    for strategy, rows in product(strategies, [micro] if micro else _micro_batches(work, mesh, multiple)):
        need = _working_bytes(op, shape, dtype, work, mesh, rows, strategy.of_passes, untrained)
        if need <= cluster.device.usable_bytes:
            time_s = node_time_s(op, shape, dtype, work, mesh, rows, cluster, strategy)
            found.append(ExecConfig(need, time_s, rows, strategy.recompute))
    return ParetoFront(tuple(_frontier(found)))


_working_bytes = lru_cache(maxsize=4096)(working_bytes)  # ZeRO-1 needs what is needed without


def _micro_refusal(pin: Pin, work: Workload, mesh: Mesh) -> str:
    if not pin.micro:
        return ""
    share, together = _share(work, mesh)
    if pin.micro > share:
        return f"micro{pin.micro} is more than the {share} rows of a replica"
    return f"micro{pin.micro} splits groups of {together} rows" if pin.micro % together else ""


def _share(work: Workload, mesh: Mesh) -> tuple[int, int]:
    """Rows of one replica, at most one update's, and those of them that stay together: its samples of a
    prompt, or what a loss sees at once."""
    return (work.rows_per_update or work.rows) // mesh.dp, max(work.samples_on_one(mesh.dp), work.group)


def _micro_batches(work: Workload, mesh: Mesh, multiple: int = 1) -> list[int]:
    """Rows per pass of one replica, in whole groups: the fewest for each number of passes, which no others
    beat. Of many groups, for small numbers of passes only, and for halves of what is left.

    Args:
        multiple: of which the number of passes is.
    """
    share, together = _share(work, mesh)
    groups = max(1, share // together)
    most = min(isqrt(groups), MOST_PASSES)
    passes = {*range(1, most + 1), *(ceil(groups / size) for size in range(1, most + 1))}
    passes |= {2**i for i in range(groups.bit_length())}
    counts = {ceil(count / multiple) * multiple for count in passes}
    found = {ceil(groups / count) for count in counts}
    return sorted((n * together for n in found if ceil(groups / n) % multiple == 0), reverse=True)


def _candidate(
    mesh: Mesh, strategy: Strategy, kept: Residency, swap_s: float, fronts: tuple[ParetoFront, ...]
) -> Candidate:
    return Candidate(mesh.pp, mesh.dp, mesh.cp, mesh.tp, strategy, kept, swap_s, fronts)


def _more(fronts: ParetoFront, size: int) -> ParetoFront:
    return ParetoFront(tuple(replace(w, need_bytes=w.need_bytes + size) for w in fronts.configs))


def _frontier(configs: Iterable[ExecConfig]) -> Iterator[ExecConfig]:
    """By rising need, those that are faster than all that need less."""
    best = float("inf")
    for config in sorted(configs, key=lambda c: (c.need_bytes, c.time_s, -c.micro_batch)):
        if config.time_s < best:
            best = config.time_s
            yield config


def _undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    kept: list[Candidate] = []
    for candidate in candidates:
        if not any(_beats(other, candidate) for other in kept):
            kept = [other for other in kept if not _beats(candidate, other)] + [candidate]
    return kept


def _spread(strategy: Strategy) -> tuple[int, bool, bool]:
    """What says, beside the mesh, which device has which weights."""
    return strategy.ep, strategy.whole_experts, strategy.zero == 3


def _beats(one: Candidate, other: Candidate) -> bool:
    """Whether `one` is no worse in every respect; both are on one mesh."""
    if one.idle_bytes > other.idle_bytes or one.kept.copy_bytes > other.kept.copy_bytes:
        return False
    if _spread(one.strategy) != _spread(other.strategy):
        return False  # their weights lie elsewhere
    swap_s = one.swap_s - other.swap_s
    for mine, theirs in zip(one.fronts, other.fronts):
        pairs = ((mine.fastest(config.need_bytes), config) for config in theirs.configs)
        if any(fast is None or fast.time_s + swap_s > config.time_s for fast, config in pairs):
            return False
    return True
