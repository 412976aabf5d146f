"""The process groups of one mesh. A process that holds models in different layouts has groups for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.layout import Mesh
from hflow.plan.sharding import Sharding
from hflow.units import device_text

Ranks = tuple[int, ...]
NewGroup = Callable[[Ranks], ProcessGroup]


@dataclass(frozen=True)
class Groups:
    """Those that a rank belongs to: along each axis; `dp_cp`, of the ranks that have the same weights and sum
    their gradients; of its model-parallel `replica` (pp and tp), which has all weights once; of all the
    `mesh`'s ranks; of itself `alone`. `ends`: the first and the last of its pipeline stages, and `first`, the
    first by itself; None on other stages. `kv`: the neighbours along tp that hold the same key-value heads;
    the rank alone where it shares none.

    Of expert parallelism: `ep`, the neighbours that share the experts of a layer; `expert_dp`, those that
    hold the same experts; `expert_replica`, those that hold one copy of all experts. Without it the rank
    alone, `dp_cp` and `replica`. `expert_tp`: those that have a part of the same experts each; the rank alone
    where tp cuts none.
    """

    tp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    pp: ProcessGroup
    replica: ProcessGroup
    ends: ProcessGroup | None
    first: ProcessGroup | None
    alone: ProcessGroup
    mesh: ProcessGroup
    ep: ProcessGroup
    expert_dp: ProcessGroup
    expert_replica: ProcessGroup
    expert_tp: ProcessGroup
    kv: ProcessGroup

    def __deepcopy__(self, memo: object) -> Groups:
        """Itself: groups are handles, which Megatron copies with the configuration that they come in."""
        return self

    @property
    def first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def reports(self) -> bool:
        """True on the one rank of each data-parallel replica that reports what all its ranks know."""
        return self.last_stage and self.tp.rank() == 0 and self.cp.rank() == 0


def make_groups(sharding: Sharding, rank: int, new_group: NewGroup, kv_copies: int = 1) -> Groups | None:
    """The groups of a mesh for `rank`, or None when it is no member. Collective over the whole world.

    The mesh's device ids are ranks of the torch.distributed world. Every rank of the world must call
    this for the same meshes in the same order, since every rank takes part in making every group;
    `new_group` may remember groups that it made before. `kv_copies`: how many neighbours along tp hold the
    same key-value heads (`ModelShape.kv_copies`).

    Raises:
        HflowError: HF302 when devices do not ascend along tp, cp or pp, or among those that share experts:
            torch orders the ranks of a group, so that parts of the model would lie on other devices than the
            mesh says.
    """
    mesh = sharding.mesh
    for axis in ("tp", "cp", "pp"):
        _check_order(mesh, axis, mesh.groups(axis))
    _check_order(mesh, "dp", sharding.expert_peers)
    tp = _own(mesh.groups("tp"), rank, new_group)
    cp = _own(mesh.groups("cp"), rank, new_group)
    dp = _own(mesh.groups("dp"), rank, new_group)
    dp_cp = _own(mesh.groups("dp", "cp"), rank, new_group)
    pp = _own(mesh.groups("pp"), rank, new_group)
    replica = _own(mesh.groups("pp", "tp"), rank, new_group)
    ends = _own([tuple(dict.fromkeys((p[0], p[-1]))) for p in mesh.groups("pp")], rank, new_group)
    first = _own([(p[0],) for p in mesh.groups("pp")], rank, new_group)
    alone = _own([(device,) for device in mesh.devices], rank, new_group)
    everyone = _own([mesh.devices], rank, new_group)
    if not (tp and cp and dp and dp_cp and pp and replica and alone and everyone):
        return None
    experts = (alone, dp_cp, replica)
    if sharding.ep > 1:
        experts = _expert_groups(sharding, rank, new_group)
    kv = alone
    if kv_copies > 1:
        starts = range(0, mesh.tp, kv_copies)
        kv = _own([g[i : i + kv_copies] for g in mesh.groups("tp") for i in starts], rank, new_group)
    assert kv
    expert_tp = alone if sharding.whole_experts else tp
    return Groups(tp, cp, dp, dp_cp, pp, replica, ends, first, alone, everyone, *experts, expert_tp, kv)


def _expert_groups(
    sharding: Sharding, rank: int, new_group: NewGroup
) -> tuple[ProcessGroup, ProcessGroup, ProcessGroup]:
    """`Groups.ep`, `expert_dp` and `expert_replica`."""
    mesh, ep = sharding.mesh, sharding.ep
    if sharding.whole_experts:
        sets_of_stage = len(mesh.devices) // mesh.pp // ep
        whole = [sum(sharding.expert_peers[n::sets_of_stage], ()) for n in range(sets_of_stage)]
    else:
        whole = [
            tuple(device for device in group if mesh.coordinates(device)["dp"] // ep == part)
            for group in mesh.groups("pp", "dp", "tp")
            for part in range(mesh.dp // ep)
        ]
    sets = sharding.expert_peers, sharding.expert_replicas, whole
    peers, replicas, replica = (_own(each, rank, new_group) for each in sets)
    assert peers and replicas and replica
    return peers, replicas, replica


def _check_order(mesh: Mesh, axis: str, groups: Iterable[Ranks]) -> None:
    for ranks in groups:
        if list(ranks) != sorted(ranks):
            problem = f"devices {device_text(ranks)} do not ascend along {axis} of mesh {mesh}"
            raise HflowError(
                Diagnostic("HF302", problem, help="name the devices of a pin in ascending order")
            )


def _own(sets: Iterable[Ranks], rank: int, new_group: NewGroup) -> ProcessGroup | None:
    """Make a group of each set of ranks, in order; the one that `rank` belongs to."""
    own = None
    for ranks in sets:
        group = new_group(ranks)
        if rank in ranks:
            own = group
    return own
