"""The process groups of one mesh, in the form in which Megatron takes them.

Nothing here (or anywhere in hflow) initialises Megatron's global ``parallel_state``: one process holds
several models with different layouts, each with groups of its own.
"""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection

from hflow.runtime.engines.groups import Groups


def collection(groups: Groups) -> ProcessGroupCollection:
    """Everything that Megatron asks for by name. Of context-parallel ranks it is told only that they sum
    their gradients: each runs its own places, and hflow's attention has them exchange keys and values."""
    tp, dp, copies, replica = groups.tp, groups.dp, groups.dp_cp, groups.replica
    made = ProcessGroupCollection(
        tp=tp, dp=dp, pp=groups.pp, mp=replica, embd=groups.ends, pos_embd=groups.first,
        cp=groups.alone, ep=groups.ep,
    )  # fmt: skip
    for name, group in {
        "tp_cp": tp, "expt_tp": groups.expert_tp, "tp_ep_pp": groups.expert_replica,
        "dp_cp": copies, "intra_dp_cp": copies,
        "expt_dp": groups.expert_dp, "intra_expt_dp": groups.expert_dp,
        "intra_dist_opt": groups.mesh, "inter_dist_opt": None, "hcp": None, "tp_dp_cp": None,
    }.items():  # fmt: skip
        setattr(made, name, group)
    return made
