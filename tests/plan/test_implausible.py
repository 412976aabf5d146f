"""Numbers of cluster files in a wrong unit are told with the right one; those of real machines never are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from random import Random
from typing import Any

import pytest
from ruamel.yaml import YAML

from hflow.diagnostics import Diagnostic
from hflow.plan.cluster import Calibration, Cluster, DeviceKind, Link
from hflow.plan.cluster_file import check_cluster
from hflow.plan.cluster_text import cluster_text

FILES = sorted(Path("clusters").glob("*.yaml"))
# By data sheets: dense FLOP/s in bf16 (or f32, where that is faster), GB, bytes/s, and links of one device in
# one direction: inside a host, to the host's memory.
GPUS = {
    "Jetson Nano": (0.236e12, 2, 25.6e9, 1.25e8, 8e9),
    "GTX 1050": (1.9e12, 2, 112e9, 1e9, 1e9),
    "T4": (65e12, 16, 320e9, 16e9, 16e9),
    "V100": (125e12, 32, 900e9, 150e9, 16e9),
    "RTX 4090": (165e12, 24, 1008e9, 32e9, 32e9),
    "MIG 1g.5gb": (44e12, 5, 250e9, 1e9, 4e9),
    "MI300X": (1307e12, 192, 5.3e12, 448e9, 64e9),
    "TPU v5p": (459e12, 95, 2.765e12, 300e9, 16e9),
    "DGX Spark": (125e12, 128, 273e9, 25e9, 300e9),
    "GB300": (2.5e15, 288, 8e12, 900e9, 450e9),
    "Gaudi 3": (1.835e15, 128, 3.7e12, 262e9, 64e9),
    "WSE-3": (125e15, 44, 21e15, 1e12, 150e9),
}
NICS = (1e9, 10e9, 25e9, 100e9, 200e9, 400e9, 800e9)  # bits/s
UNITS = {
    "flops": {"GFLOP/s": 1e9, "TFLOP/s": 1e12},
    "bf16_flops": {"GFLOP/s": 1e9, "TFLOP/s": 1e12},
    "memory_gb": {"MiB": 2**20 / 1e9, "TB": 1e3},
    "memory_bandwidth": {"GB/s": 1e9, "TB/s": 1e12, "MB/s": 1e6},
    "bandwidth": {"GB/s": 1e9, "MB/s": 1e6},
    "nic": {"GB/s": 1e9, "Gbit/s": 1e9 / 8, "MB/s": 1e6},
    "latency": {"µs": 1e-6},
    "kernel_latency": {"µs": 1e-6},
    "layer_overhead": {"µs": 1e-6},
    "score_layer_overhead": {"µs": 1e-6},
    "train_layer_overhead": {"µs": 1e-6},
    "host_memory_gb": {"TB": 1e3},
    "server_gb": {"MiB": 2**20 / 1e9},
    "token_step": {"ms": 1e-3},
}


def written(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_shipped_clusters_are_plausible(file: Path) -> None:
    assert check_cluster(file)[1] == ()


def with_gpus(random: Random) -> Cluster:
    """Hosts of GPUs, measured or by data sheet."""
    name, (flops, memory, rate, inside, to_host) = random.choice(list(GPUS.items()))
    share = random.uniform(0.3, 1)  # what is measured of the rates
    device = DeviceKind(
        name, "cuda", share * flops, memory * 10**9, share * rate, 0.5,
        layer_overhead_s=random.choice((0.0, 2e-3)), kernel_latency_s=random.choice((0.0, 4e-6, 2e-5)),
    )  # fmt: skip
    latency_s = 10 ** random.uniform(-6, -3)
    nic = Link(share * random.choice(NICS) / 8, random.choice((0.0, latency_s, 0.08)))
    return Cluster(
        "drawn", device, random.randint(1, 64), random.randint(1, 16), Link(share * inside, latency_s), nic,
        Link(share * to_host, 1e-5), random.randint(1, 8),
        host_memory_bytes=random.choice((2, 64, 2048)) * 10**9, server_bytes=random.choice((0, 3 * 10**9)),
        wake=random.choice((None, Link(10 ** random.uniform(9, 11), random.uniform(0, 60)))),
    )  # fmt: skip


def with_cpus(random: Random) -> Cluster:
    """What `hflow calibrate` measures of a host, from one core of a Raspberry Pi 3 on; of the slowest with so
    many workers that each has a part of a core."""
    workers = random.choice((1, 2, 4, 64))
    crowd = random.choice((1, workers))
    memory = random.choice((1, 4, 16, 512, 24_000)) * 9 * 10**8 // workers // 10**8 * 10**8
    device = DeviceKind(
        "cpu", "cpu", 10 ** random.uniform(8.7, 13) / crowd, max(memory, 10**8),
        10 ** random.uniform(9, 12) / crowd, 0.5, layer_overhead_s=10 ** random.uniform(-5, -2),
        calibration=Calibration(0.01, 0.3, 0.3, 1.0), bf16_flops=10 ** random.uniform(8.7, 13.7) / crowd,
    )  # fmt: skip
    link = Link(10 ** random.uniform(8, 11) / crowd, 10 ** random.uniform(-5, -2))
    return Cluster("drawn", device, 1, workers, link, link)


@pytest.mark.parametrize("draw", [with_gpus, with_cpus])
def test_machines_that_there_are_are_plausible(draw: Any, tmp_path: Path) -> None:
    for seed in range(100):
        file = written(tmp_path, cluster_text(draw(Random(seed))))
        cluster, warnings = check_cluster(file)
        assert (cluster.name, warnings) == ("drawn", ()), (seed, [w.message for w in warnings])


def numbers(file: Path) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The places of a cluster file that hold a number with a unit, and the kind of each."""
    tree = plain(file)
    groups = [("groups", i) for i in range(len(tree["groups"]))] if "groups" in tree else [()]
    for where in groups:
        device = reduce(lambda node, key: node[key], where, tree)["device"]
        keys = ("flops", "memory_gb", "memory_bandwidth", "kernel_latency", "layer_overhead")
        yield from ((((*where, "device", key), key)) for key in keys if key in device)
    for link in ("intra_host", "inter_host", "host"):
        if link in tree["links"]:
            yield ("links", link, "bandwidth"), "nic" if link == "inter_host" else "bandwidth"
            yield ("links", link, "latency"), "latency"
    if "host_memory_gb" in tree:
        yield ("host_memory_gb",), "host_memory_gb"
    if "engines" in tree:
        yield from ((("engines", key), key) for key in ("server_gb", "token_step") if key in tree["engines"])


def plain(file: Path) -> Any:
    return json.loads(json.dumps(YAML(typ="safe").load(file)))


def warned(file: Path, folder: Path, path: tuple[str | int, ...], value: float) -> tuple[Diagnostic, ...]:
    """What is told of the cluster with another value at `path`; where it is told, the value stands."""
    tree = plain(file)
    reduce(lambda node, key: node[key], path[:-1], tree)[path[-1]] = value
    text = json.dumps(tree, indent=1)
    _, warnings = check_cluster(written(folder, text))
    for warning in warnings:
        assert warning.span
        line = text.splitlines()[warning.span.line - 1]
        assert line[warning.span.column - 1 : warning.span.end_column - 1] == json.dumps(value)
    return warnings


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_another_unit_is_told_and_the_true_value_is_suggested(file: Path, tmp_path: Path) -> None:
    """Of every number of every shipped cluster, in every unit in which it could be taken for its own."""
    told: set[str] = set()
    for path, kind in numbers(file):
        true = reduce(lambda node, key: node[key], path, plain(file))
        for unit, factor in UNITS[kind].items():
            if true / factor < 1 and kind not in ("memory_gb", "host_memory_gb"):
                continue  # less than 1 is refused
            if kind == "memory_gb" and unit == "MiB" and true < 10:
                continue  # as many GB as MiB are plausible of a host
            if kind == "host_memory_gb" and true > 250:
                continue  # some hosts have no more GB than others have TB
            (warning,) = warned(file, tmp_path, path, true / factor)
            assert (warning.code, warning.severity) == ("HF301", "warning")
            assert f"`{'.'.join(map(str, path))}: " in warning.message
            suggested = dict(re.findall(r"(\S+) \([\d.e+-]+ ([^)]+)\)", warning.help))
            found = [u for text, u in suggested.items() if abs(float(text) / true - 1) < 1e-4]
            assert found == [unit], (path, unit, warning.help)
            told.add(kind)
    assert {"flops", "memory_gb", "memory_bandwidth", "bandwidth", "nic", "latency"} <= told


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [("bandwidth", 14.2, "14.2e9 (14.2 GB/s)"), ("latency", 900, "900e-3 (900 ms)")],
)
def test_another_unit_of_waking_is_told(key: str, value: float, meant: str, tmp_path: Path) -> None:
    file = tmp_path / "waking.yaml"
    waking = "engines: {wake: {bandwidth: 14.2e9, latency: 7.7}}\n"
    file.write_text(Path("clusters/h100x8.yaml").read_text() + waking)
    assert check_cluster(file)[1] == ()
    (warning,) = warned(file, tmp_path, ("engines", "wake", key), value)
    assert f"`engines.wake.{key}: " in warning.message and meant in warning.help


def test_a_number_that_no_unit_explains_is_told_what_is_plausible(tmp_path: Path) -> None:
    (warning,) = warned(Path("clusters/h100x8.yaml"), tmp_path, ("device", "flops"), 9.89e17)
    assert warning.message.endswith("floating-point operations per second, implausibly high")
    assert warning.help == "from 1e10 to 2e17 is plausible"


def test_the_plan_is_made_and_the_warning_is_no_part_of_it(tmp_path: Path) -> None:
    text = Path("clusters/h100x8.yaml").read_text()
    assert text.count("989e12 ") == 1
    file = written(tmp_path, text.replace("989e12 ", "989 "))
    command = [sys.executable, "-m", "hflow.cli.app", "compile", "algorithms/sft.yaml", "--json"]
    command += ["--set", "params.model=shape:qwen2.5-0.5b", "--cluster", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["step_time_s"] > 1e9
    assert done.stderr.count("warning[HF301]: ") == 1
    line = 1 + text[: text.index("989e12")].count("\n")
    assert f"{file}:{line}:10\n" in done.stderr
    assert "is 989 floating-point operations per second" in done.stderr
    assert "did you mean 989e12 (989 TFLOP/s)?" in done.stderr
