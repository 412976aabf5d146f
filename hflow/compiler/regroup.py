"""The device order of a generation mesh such that every training shard lies inside its generation shard.

HybridFlow section 5.3: training (p, t, d) -> generation (1, t_g, d_g·d) with d_g = p·t / t_g. With
rt = t / t_g, a rank (p_i, d_i, t_i) takes the place tp = t_i ÷ rt, replica = d_i·d_g + p_i·rt + t_i mod rt.
Then no device receives a byte it holds: what arrives is (d_g - 1)/(t·p) of the model, Table 2's optimum.
"""

from __future__ import annotations

from hflow.compiler.layout import Mesh


def generation_mesh(train: Mesh, tp: int) -> Mesh | None:
    """`train`'s devices, regrouped for tensor parallelism `tp`; None if t_g = `tp` does not divide t."""
    if train.tp % tp:
        return None
    ratio = train.tp // tp
    micro = train.pp * ratio  # micro data parallel size: HybridFlow's d_g
    place: dict[tuple[int, int], int] = {}
    for device in train.devices:
        at = train.coordinates(device)
        replica = at["dp"] * micro + at["pp"] * ratio + at["tp"] % ratio
        place[replica, at["tp"] // ratio] = device
    return Mesh.of(tuple(place[key] for key in sorted(place)), dp=train.dp * micro, tp=tp)
