"""The device order of a generation mesh such that every training shard lies inside its generation shard.

HybridFlow section 5.3: training (p, t, d) -> generation (p_g, t_g, d_g·d) with d_g = p·t / (p_g·t_g). With
rp = p / p_g and rt = t / t_g, a rank (p_i, d_i, t_i) takes the place pp = p_i ÷ rp, tp = t_i ÷ rt,
replica = d_i·d_g + (p_i mod rp)·rt + t_i mod rt. Then no device receives a byte it holds: what arrives is
(d_g - 1)/(t·p) of the model, Table 2's optimum.
"""

from __future__ import annotations

from hflow.plan.layout import Mesh


def generation_mesh(train: Mesh, tp: int, pp: int = 1) -> Mesh | None:
    """`train`'s devices, regrouped into `pp` stages of tensor parallelism `tp`; None unless these divide
    the training sizes: the shards could not lie inside each other."""
    if train.tp % tp or train.pp % pp:
        return None
    stages, ranks = train.pp // pp, train.tp // tp  # of training that become one of generation: rp and rt
    micro = stages * ranks  # micro data parallel size: HybridFlow's d_g
    place: dict[tuple[int, int, int], int] = {}
    for device in train.devices:
        at = train.coordinates(device)
        copy = at["dp"] * train.cp + at.get("cp", 0)  # ranks of cp have the same weights, as those of dp do
        replica = copy * micro + at["pp"] % stages * ranks + at["tp"] % ranks
        place[at["pp"] // stages, replica, at["tp"] // ranks] = device
    return Mesh.of(tuple(place[key] for key in sorted(place)), pp=pp, dp=train.copies * micro, tp=tp)
