"""`hflow calibrate` measures what can be measured otherwise too, and writes a file that is a cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from hflow.diagnostics import HflowError
from hflow.plan.cluster_file import load_cluster
from hflow.runtime.tools import calibrate as calibration
from hflow.runtime.tools.calibrate import join
from hflow.runtime.tools.measurements import MEASUREMENTS, Setting

CALIBRATE = [sys.executable, "-m", "hflow.cli.app", "calibrate"]


def calibrate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CALIBRATE, *arguments], capture_output=True, text=True, timeout=500)


def seconds_of_product(size: int) -> float:
    """The median of several, of numpy."""
    a = np.random.default_rng(0).random((size, size), dtype=np.float32)
    times: list[float] = []
    for _ in range(7):
        started = time.perf_counter()
        np.matmul(a, a)
        times.append(time.perf_counter() - started)
    return median(times)


@pytest.mark.rotating(6)
@pytest.mark.slow
@pytest.mark.timeout(600)  # ten seconds, but every process waits for the slowest on a busy machine
def test_a_measured_cluster_is_plausible(tmp_path: Path) -> None:
    """Against numpy within a factor of 8: another library, other threads, and a machine that others use."""
    file = tmp_path / "mine.yaml"
    done = calibrate("--workers", "1", "--output", str(file))
    assert done.returncode == 0, done.stderr
    labels = [line[:24].strip() for line in done.stdout.splitlines()]
    assert labels[0] == "matrix product" and labels[-2:] == ["wrote", "next"]
    cluster = load_cluster(file)
    assert (cluster.name, cluster.num_devices) == ("mine", 1)
    if cluster.device.platform == "cpu":
        flops = 2 * 1024**3 / seconds_of_product(1024)
        assert flops / 8 < cluster.device.flops < flops * 8
        assert cluster.device.bf16_flops and cluster.device.bf16_flops > flops / 64
        assert 1e8 < cluster.intra_host.bandwidth < 1e11 and 1e-6 < cluster.intra_host.latency_s < 1e-2
        assert 1e-6 < cluster.device.layer_overhead_s < 1e-2
    assert cluster.device.memory_bandwidth > 1e9
    again = calibrate("--output", str(file))
    assert again.returncode == 1 and "error[HF001]" in again.stderr and "--force" in again.stderr


def test_of_a_gpu_all_memory_is_told_and_what_is_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=85_050_000_000)
    )
    rates = {name: 1e9 for name in MEASUREMENTS if name != "overhead_bytes"}
    cluster = calibration._cluster("mine", Setting("cuda", 1, 1, 1), rates | {"overhead_bytes": 1.234e9})
    device = cluster.device
    assert (device.memory_bytes, device.reserve_bytes) == (85_000_000_000, 8_500_000_000)
    assert device.overhead_bytes == 1_230_000_000
    assert cluster.host_memory_bytes and cluster.host_memory_bytes < psutil.virtual_memory().total
    on_cpu = calibration._cluster("mine", Setting("cpu", 1, 2, 1), rates)
    assert on_cpu.host_memory_bytes is None and not on_cpu.device.reserve_bytes


def test_on_cpus_decoding_has_rates_of_its_own() -> None:
    rates = dict.fromkeys(MEASUREMENTS, 1000000000.0)
    rates |= {"matrix_flops": 8e9, "decode_flops": 2e9, "memory_bandwidth": 4e9, "decode_weights": 3e9}
    calibrated = calibration._cluster("mine", Setting("cpu", 1, 2, 1), rates).device.calibration
    assert calibrated.decode_efficiency == 2 / 8
    assert calibrated.weights_efficiency == 3 / 4
    least = {"score_layer_overhead_s": 2e-4, "train_layer_overhead_s": 7e-4}
    device = calibration._cluster("mine", Setting("cpu", 1, 2, 1), rates | least).device
    assert (device.score_layer_overhead_s, device.train_layer_overhead_s) == (2e-4, 7e-4)
    device = calibration._cluster("mine", Setting("cpu", 1, 2, 1), rates | {"bf16_train_flops": 5e9}).device
    assert (device.flops, device.calibration.train_efficiency, device.bf16_flops) == (8e9, 1 / 8, 4e10)
    gpu = {name: rate for name, rate in rates.items() if not name.startswith("decode")}
    calibrated = calibration._cluster("mine", Setting("cpu", 1, 2, 1), gpu).device.calibration
    assert calibrated.decode_efficiency is None and calibrated.weights_efficiency is None


def _fail(rank: int) -> None:
    raise RuntimeError("no memory left")


@pytest.mark.slow
def test_a_process_that_fails_is_told() -> None:
    processes = start_processes(_fail, nprocs=1, join=False, daemon=True, start_method="spawn")
    assert processes
    with pytest.raises(HflowError, match="HF404.*no memory left"):
        while not join(processes):
            pass
