"""Measure this machine, as the cluster that plans are made for.

One process per worker takes each measurement while all others take it too, since they share caches,
memory and power. A value is the median over workers of the median over runs.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from hflow.diagnostics import Diagnostic, HflowError
from hflow.ending_signals import EndingSignals
from hflow.plan.cluster import Calibration, Cluster, DeviceKind, Link
from hflow.plan.layout import Mesh
from hflow.plan.sharding import Sharding
from hflow.runtime.cores import allowed
from hflow.runtime.engines.groups import make_groups
from hflow.runtime.tools.measurements import MEASUREMENTS, Seat, Setting
from hflow.runtime.worker.world import World

POLL_S = 0.1
MEMORY_SHARE = 0.9  # of the machine's; the rest is left to the system and the controller
RESERVE = 0.1  # of a GPU's: an allocator leaves gaps
HOST_LATENCY_S = 1e-5  # of a copy between GPU and host: its order of magnitude, not measured
NO_LINK = Link(1e9, 1e-4)
DIGITS = 3  # more would be noise

Say = Callable[[str, str], None]


def calibrate(name: str, workers: int | None = None, say: Say = lambda label, value: None) -> Cluster:
    """The cluster `name` with the measured rates of this machine: one host of `workers` devices.

    Args:
        workers: devices; by default all GPUs, or without any two CPU workers (one on a single core).
        say: told each measurement as it is made: what, and how much.

    Raises:
        HflowError: HF404 when a measuring process fails, or there are fewer GPUs than `workers`.
    """
    setting = _setting(workers)
    measured: dict[str, float] = {}
    results: SimpleQueue[tuple[str, float]] = get_context("spawn").SimpleQueue()
    with EndingSignals() as signals, tempfile.TemporaryDirectory(prefix="hflow-calibrate-") as folder:
        processes = _start(setting, folder, results)
        try:
            with signals.interruptible():
                _collect(processes, results, measured, say)
        finally:
            for process in processes.processes:
                process.kill()
    return _cluster(name, setting, measured)


def _collect(
    processes: ProcessContext, results: SimpleQueue[tuple[str, float]], measured: dict[str, float], say: Say
) -> None:
    """Until all processes have ended."""
    done = False
    while not done:
        done = join(processes)
        while not results.empty():
            key, value = results.get()
            measured[key] = value
            say(MEASUREMENTS[key].label, MEASUREMENTS[key].text(value))


def _start(setting: Setting, folder: str, results: SimpleQueue[tuple[str, float]]) -> ProcessContext:
    """The measuring processes. Ctrl-C is for this one, which ends them: they inherit that it is ignored."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    try:
        processes = start_processes(
            _measure_all, (setting, folder, results), setting.ranks, join=False, daemon=True,
            start_method="spawn",
        )  # fmt: skip
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)
    assert processes
    return processes


def _setting(workers: int | None) -> Setting:
    gpus, cores = torch.cuda.device_count(), len(allowed())
    if 0 < gpus < (workers or 0):
        raise HflowError(Diagnostic("HF404", f"{workers} workers need as many GPUs; here are {gpus}"))
    count = workers or gpus or min(2, cores)
    if gpus:
        return Setting("cuda", count, count, 1)
    return Setting("cpu", count, max(2, count), max(1, cores // count))  # a link has two ends


def join(processes: ProcessContext) -> bool:
    """Whether all have ended well, after a short wait."""
    try:
        return processes.join(timeout=POLL_S)
    except ProcessException as error:  # of which the last line says what happened
        *_, reason = str(error).strip().splitlines()
        raise HflowError(Diagnostic("HF404", f"a measuring process failed: {reason}")) from error


def _measure_all(rank: int, setting: Setting, folder: str, results: SimpleQueue[tuple[str, float]]) -> None:
    """What one process does: it takes part in every measurement; rank 0 hands the results out."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all processes are on this host
    torch.set_num_threads(setting.threads)
    device = torch.device(setting.platform, rank) if setting.platform == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = FileStore(str(Path(folder) / "meeting"), setting.ranks)
    world = World.join(store, rank, setting.ranks, device)
    pair = world.group((0, 1)) if setting.ranks > 1 else None
    everyone = [make_groups(Sharding(Mesh.of((r,))), rank, world.group) for r in range(setting.ranks)]
    own = everyone[rank]
    assert own
    split = make_groups(Sharding(Mesh.of((0, 1), tp=2)), rank, world.group) if setting.ranks > 1 else None
    seat = Seat(rank, setting, device, own, pair, split)
    for name, measurement in MEASUREMENTS.items():
        takers = measurement.ranks(setting)
        if not takers:
            continue
        value = torch.tensor(measurement.take(seat) if rank < takers else 0.0, dtype=torch.float64)
        values = [torch.zeros_like(value) for _ in range(setting.ranks)]
        dist.all_gather(values, value)  # which also lets all begin the next one together
        if rank == 0:
            results.put((name, median(v.item() for v in values[:takers])))
    world.close()


def _cluster(name: str, setting: Setting, measured: Mapping[str, float]) -> Cluster:
    m = {key: float(f"{value:.{DIGITS}g}") for key, value in measured.items()}
    score, train = (_share(m[key], m["matrix_flops"]) for key in ("score_flops", "train_flops"))
    decode = _share(m["decode_flops"], m["matrix_flops"]) if "decode_flops" in m else None
    weights = _share(m["decode_weights"], m["memory_bandwidth"]) if "decode_weights" in m else None
    # A single GPU has no other to send to; and there is one host, so `inter_host` is never used.
    link = Link(m["link_bandwidth"], m["link_latency_s"]) if "link_bandwidth" in m else NO_LINK
    host = Link(m["host_bandwidth"], HOST_LATENCY_S) if "host_bandwidth" in m else None
    device = DeviceKind(
        name=torch.cuda.get_device_name(0) if setting.platform == "cuda" else "cpu",
        platform=setting.platform,
        flops=m["matrix_flops"],
        memory_bytes=_memory_bytes(setting),
        reserve_bytes=int(RESERVE * _memory_bytes(setting)) if setting.platform == "cuda" else 0,
        overhead_bytes=int(m.get("overhead_bytes", 0.0)),
        memory_bandwidth=m["memory_bandwidth"],
        efficiency=train,
        layer_overhead_s=m["layer_overhead_s"],
        # All of the memory bandwidth, which was reached.
        calibration=Calibration(train, score, score, 1.0, decode, weights),
        score_layer_overhead_s=m.get("score_layer_overhead_s"),
        train_layer_overhead_s=m.get("train_layer_overhead_s"),
        bf16_flops=float(f"{m['bf16_train_flops'] / train:.{DIGITS}g}") if "bf16_train_flops" in m else None,
    )
    return Cluster(name, device, 1, setting.workers, link, link, host, host_memory_bytes=_host_bytes(setting))


def _share(reached: float, peak: float) -> float:
    return min(1.0, round(reached / peak, DIGITS))


def _host_bytes(setting: Setting) -> int | None:
    """Where devices have memory of their own."""
    return int(MEMORY_SHARE * psutil.virtual_memory().total) if setting.platform == "cuda" else None


def _memory_bytes(setting: Setting) -> int:
    """Of one device, in tenths of a GB."""
    if setting.platform == "cuda":
        return torch.cuda.get_device_properties(0).total_memory // 10**8 * 10**8
    return int(MEMORY_SHARE * psutil.virtual_memory().total / setting.workers // 10**8) * 10**8
