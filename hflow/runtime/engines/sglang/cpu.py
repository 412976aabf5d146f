"""The one room for running SGLang without CUDA; a server with devices never enters it.

SGLang serves CPUs through kernels for Intel AMX that have to be built from source. Without them, everything
that hflow uses runs on PyTorch's own operations: with the settings below, a stand-in for the kernel package,
and deterministic inference as on CUDA, but for its Triton kernels. SGLang reads its environment as it is
imported, so this module imports SGLang in functions only.
"""

# SGLang is installed on demand
# pyright: reportMissingImports=false
from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.runtime.cores import share_out
from hflow.runtime.engines.lifetime import forks_die_with_their_parents

STAND_IN = Path(__file__).parent / "stand_in"
BIND = "SGLANG_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True)
class CpuSetting:
    """`name` must be `value` on CPUs, because of `reason`."""

    name: str
    value: str
    reason: str


ENVIRONMENT = (
    CpuSetting("SGLANG_USE_CPU_ENGINE", "1", "without, SGLang knows of no device on this machine"),
    CpuSetting(
        "GOMP_SPINCOUNT",
        "2000",
        "threads spin long while they wait for each other: on shared cores that is up to 30 times slower",
    ),
    CpuSetting(
        "TORCHDYNAMO_DISABLE",
        "1",
        "sampling with a seed is compiled, and the compiler cannot look into the stand-in",
    ),
)
ARGUMENTS = (
    CpuSetting(
        "attention_backend",
        "torch_native",
        "the default on CPUs is intel_amx, which needs AMX and is not deterministic",
    ),
)


def prepare(cores: Sequence[int], ranks: int, hosts: int = 1) -> None:
    """Make SGLang importable in this process and its children; before SGLang or torch is imported.

    `cores`: all that they may use; none: those that this process may. `ranks`: on each of the server's hosts.
    """
    for setting in ENVIRONMENT:
        os.environ[setting.name] = setting.value
    sys.path.append(str(STAND_IN))  # last: a kernel package that somebody has built comes first
    if cores:
        os.sched_setaffinity(0, cores)
    here = bind(sorted(os.sched_getaffinity(0)), ranks)
    os.environ[BIND] = "|".join([here] * hosts)  # an entry for each rank; those of others nobody reads


def bind(cores: Sequence[int], ranks: int) -> str:
    """The cores of each rank as SGLang writes it, ``0,1|2,3``: as evenly as can be; with fewer cores than
    ranks some share one."""
    return "|".join(",".join(map(str, share)) for share in share_out(cores, ranks))


def arguments() -> dict[str, Any]:
    """Arguments of the server; from now on SGLang takes them."""
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices

    # PyTorch's attention treats one sequence after the other, so batches cannot change it
    add_deterministic_attention_backend_choices(["torch_native"])
    return {setting.name: setting.value for setting in ARGUMENTS}


def fork_children() -> None:
    """SGLang starts its processes anew, and each imports for seconds what this one has imported. Without a
    device, whose state must not be copied, they can be copies of this process: made before it has computed
    anything, so that PyTorch's threads are not there yet.
    """
    from sglang.srt.entrypoints import engine

    configure = engine._set_envs_and_config

    def configure_and_fork(server_args: Any) -> None:
        configure(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = configure_and_fork
    forks_die_with_their_parents()


def run_scheduler(server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any) -> None:
    """SGLang's `run_scheduler_process` for one rank, on its own cores, with the patches that it needs."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    use_cores([int(core) for core in os.environ[BIND].split("|")[tp_rank].split(",")])
    keep_torch_kernels()
    keep_unpinned()
    share_kv_heads()
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest)


def use_cores(cores: Sequence[int]) -> None:
    """SGLang leaves it to its kernel package to bind a rank's threads."""
    import torch

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def keep_torch_kernels() -> None:
    """Deterministic inference replaces PyTorch's matrix products by Triton kernels, which CPUs cannot run."""
    from sglang.srt import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode = _nothing


def keep_unpinned() -> None:
    """What SGLang keeps in the host's memory of the experts that are chosen, it pins there with CUDA."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = _nothing


def share_kv_heads() -> None:
    """Where there are more ranks than heads of keys and values, several ranks have the same head on GPUs. On
    CPUs SGLang adds heads of zeros instead, with as many queries as others have: ranks would hold other
    weights than those that they are sent."""
    from sglang.srt.model_executor import model_runner

    adjust = model_runner.adjust_config_with_unaligned_cpu_tp

    def adjusted(model_config: Any, load_config: Any, tp: int) -> Any:
        heads, pairs = model_config.num_attention_heads, model_config.get_total_num_kv_heads()
        if heads % tp or tp % pairs:
            return adjust(model_config, load_config, tp)
        model_config.get_total_num_kv_heads = lambda: tp  # as if each rank had a head of its own
        try:
            return adjust(model_config, load_config, tp)
        finally:
            del model_config.get_total_num_kv_heads

    model_runner.adjust_config_with_unaligned_cpu_tp = adjusted


def _nothing(*_args: Any, **_options: Any) -> None:
    pass
