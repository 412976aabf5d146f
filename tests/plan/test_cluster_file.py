"""Cluster files: the shipped ones hold data-sheet numbers, and every wrong value is told with its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.plan.cluster import Calibration, Link
from hflow.plan.cluster_file import load_cluster
from hflow.plan.cluster_text import cluster_text

FILES = sorted(Path("clusters").glob("*.yaml"))
GOOD = """\
hflow_cluster: 1
name: test
device:
  kind: H100
  flops: 989e12
  memory_gb: 80
  memory_bandwidth: 3.35e12
  calibration: {train_efficiency: 0.4}
hosts: 2
devices_per_host: 8
links:
  intra_host: {bandwidth: 450e9, latency: 5e-6}
  inter_host: {bandwidth: 50e9, latency: 1e-5}
  nics_per_host: 8
  host: {bandwidth: 64e9, latency: 1e-5}
"""
MIXED = """\
hflow_cluster: 1
name: test
groups:
  - device: {kind: A100, flops: 312e12, memory_gb: 80, memory_bandwidth: 2e12}
    hosts: 2
    devices_per_host: 4
  - device: {kind: H100, flops: 989e12, memory_gb: 80, memory_bandwidth: 3e12}
    hosts: 3
    devices_per_host: 8
links:
  intra_host: {bandwidth: 300e9, latency: 5e-6}
  inter_host: {bandwidth: 25e9, latency: 1e-5}
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_shipped_files_are_named_after_their_contents(file: Path) -> None:
    cluster = load_cluster(file.stem)
    assert cluster.name == file.stem
    _, times, count = file.stem.partition("x")
    assert not (times and count.isdigit()) or cluster.num_devices == int(count)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_text_of_a_cluster_is_read_back_as_the_same(file: Path, tmp_path: Path) -> None:
    cluster = load_cluster(file)
    assert load_cluster(written(tmp_path, cluster_text(cluster, "a remark"))) == cluster


@pytest.mark.parametrize("kind", ["a100", "h100"])
def test_clusters_of_a_kind_differ_in_hosts_only(kind: str) -> None:
    clusters = [load_cluster(f) for f in FILES if f.stem.startswith(f"{kind}x")]
    of_hosts = [c for c in clusters if c.devices_per_host > 1]
    assert len({replace(c, name="", hosts=1) for c in of_hosts}) == 1 < len(of_hosts)


@pytest.mark.parametrize("kind", ["a100", "h100"])
def test_one_gpu_is_one_of_its_host(kind: str) -> None:
    one, eight = load_cluster(f"{kind}x1"), load_cluster(f"{kind}x8")
    assert (one.num_devices, one.device, one.host_link) == (1, eight.device, eight.host_link)


def test_a_measured_gpu_has_the_data_sheet_of_its_host() -> None:
    one, eight = load_cluster("h200x1"), load_cluster("h200x8")
    measured = {"calibration": eight.device.calibration, "kernel_latency_s": eight.device.kernel_latency_s}
    assert one.num_devices == 1 and one.device != eight.device == replace(one.device, **measured)


def test_memory_that_is_no_plans(tmp_path: Path) -> None:
    more = GOOD.replace("memory_gb: 80", "memory_gb: 80\n  reserve: 0.1\n  overhead_gb: 1.5")
    cluster = load_cluster(
        written(tmp_path, f"{more}host_memory_gb: 512\nengines: {{server_gb: 4, token_step: 0.002}}\n")
    )
    assert cluster.device.usable_bytes == 70.5e9 and cluster.wake is None
    assert (cluster.host_memory_bytes, cluster.server_bytes) == (512 * 10**9, 4 * 10**9)
    assert cluster.token_step_s == 0.002 and not cluster.whole_rows


def test_what_trainers_pass_and_how_long_their_layers_take_at_least(tmp_path: Path) -> None:
    least = "memory_gb: 80\n  score_layer_overhead: 0.0002\n  train_layer_overhead: 0.0007"
    text = f"{GOOD.replace('memory_gb: 80', least)}engines: {{whole_rows: true}}\n"
    cluster = load_cluster(written(tmp_path, text))
    assert cluster.whole_rows
    assert (cluster.device.score_layer_overhead_s, cluster.device.train_layer_overhead_s) == (2e-4, 7e-4)
    assert load_cluster(written(tmp_path, cluster_text(cluster))) == cluster


def test_how_fast_cpus_multiply_in_bf16(tmp_path: Path) -> None:
    text = GOOD.replace("flops: 989e12", "flops: 1e11\n  platform: cpu\n  bf16_flops: 5e11")
    cluster = load_cluster(written(tmp_path, text))
    assert (cluster.device.flops, cluster.device.bf16_flops) == (1e11, 5e11)
    assert load_cluster(written(tmp_path, cluster_text(cluster))) == cluster


def test_how_servers_wake(tmp_path: Path) -> None:
    wake = "engines: {wake: {bandwidth: 12e9, latency: 6}}\n"
    cluster = load_cluster(written(tmp_path, GOOD + wake))
    assert cluster.wake == Link(12e9, 6)
    assert load_cluster(written(tmp_path, cluster_text(cluster))) == cluster
    with pytest.raises(HflowError, match=r"(?s)unknown key `engines.wake.latenz`.*did you mean `latency`"):
        load_cluster(written(tmp_path, GOOD + wake.replace("latency", "latenz")))


def test_a_rack_has_the_figures_of_its_data_sheet() -> None:
    """NVIDIA GB200 NVL72: 180 PFLOP/s (bf16, dense), 13.4 TB of 576 TB/s, NVLink 130 TB/s, 17 TB on CPUs."""
    rack = load_cluster("gb200x72")
    assert rack.num_devices * rack.device.flops == 180e15
    assert rack.num_devices * rack.device.memory_bytes == pytest.approx(13.4e12, rel=0.005)
    assert rack.num_devices * rack.device.memory_bandwidth == 576e12
    assert 2 * rack.num_devices * rack.intra_host.bandwidth == pytest.approx(130e12, rel=0.005)
    assert rack.inter_host == rack.intra_host
    assert rack.nics_per_host == rack.devices_per_host
    assert rack.hosts * (rack.host_memory_bytes or 0) == pytest.approx(17e12, rel=0.02)


def test_the_papers_testbed() -> None:
    """arXiv:2409.19256, section 8.1: 16 machines of 8 A100-80GB, NVLink 600 GB/s, 200 Gb/s between them."""
    cluster = load_cluster("a100x128")
    assert (cluster.hosts, cluster.devices_per_host, cluster.device.memory_bytes) == (16, 8, 80 * 10**9)
    assert 2 * cluster.intra_host.bandwidth == 600e9
    assert 8 * cluster.inter_host.bandwidth * cluster.nics_per_host == 200e9


def test_everything_is_read(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, GOOD))
    assert (cluster.nics_per_host, cluster.host_link) == (8, Link(64e9, 1e-5))
    assert cluster.device.platform == "cuda"
    # what is not calibrated has the default efficiency, 0.5
    assert cluster.device.calibration == Calibration(0.4, 0.5, 0.5, 0.75)
    assert cluster.device.calibration.decode_efficiency is None, "as prompts are read"
    more = GOOD.replace("{train_efficiency: 0.4}", "{train_efficiency: 0.4, decode_efficiency: 0.3}")
    cluster = load_cluster(written(tmp_path, more))
    assert cluster.device.calibration == Calibration(0.4, 0.5, 0.5, 0.75, 0.3)
    assert cluster.device.calibration.weights_efficiency is None, "read while products compute"
    more = more.replace("decode_efficiency: 0.3", "decode_efficiency: 0.3, weights_efficiency: 0.6")
    cluster = load_cluster(written(tmp_path, more))
    assert cluster.device.calibration == Calibration(0.4, 0.5, 0.5, 0.75, 0.3, 0.6)
    assert load_cluster(written(tmp_path, cluster_text(cluster))) == cluster


def test_groups_follow_each_other(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, MIXED))
    assert cluster.num_devices == len(cluster.devices) == 2 * 4 + 3 * 8
    assert [cluster.kind(d).name for d in (0, 7, 8, 31)] == ["A100", "A100", "H100", "H100"]
    assert [cluster.host(d) for d in (0, 3, 4, 7, 8, 15, 16, 31)] == [0, 0, 1, 1, 2, 2, 3, 4]


def test_a_mixed_cluster_is_not_planned_yet() -> None:
    graph = hflow.load("algorithms/sft.yaml", ["params.model=shape:qwen2.5-0.5b"])
    with pytest.raises(HflowError, match="HF307.*mixes A100-80G and H100-80G"):
        hflow.compile(graph, "mixed")


@pytest.mark.parametrize(
    ("text", "old", "new", "message", "line"),
    [
        (GOOD, "devices_per_host: 8", "devices_per_host: 0", "`devices_per_host`", 10),
        (GOOD, "hosts: 2", "hosts: -1", "`hosts`", 9),
        (GOOD, "hosts: 2", "hosts: true", "`hosts`", 9),
        (GOOD, "hosts: 2", "hosts: 2.5", "`hosts`", 9),
        (GOOD, "hosts: 2", "hosts: '2'", "`hosts`", 9),
        (
            GOOD,
            "inter_host: {bandwidth: 50e9",
            "inter_host: {bandwidth: -50e9",
            "`links.inter_host.bandwidth`",
            13,
        ),
        (
            GOOD,
            "inter_host: {bandwidth: 50e9",
            "inter_host: {bandwidth: .inf",
            "`links.inter_host.bandwidth`",
            13,
        ),
        (GOOD, "5e-6", "-1.0", "`links.intra_host.latency`", 12),
        (GOOD, "nics_per_host: 8", "nics_per_host: 0", "`links.nics_per_host`", 14),
        (GOOD, "64e9", "0", "`links.host.bandwidth`", 15),
        (GOOD, "memory_gb: 80", "memory_gb: 80\n  overhead_gb: 80", "leave nothing of `memory_gb`", 3),
        (GOOD, "flops: 989e12", "flops: 989e12\n  bf16_flops: 989e12", "`bf16_flops` is for CPUs", 3),
        (GOOD, "hosts: 2", "hosts: 2\nhost_memory_gb: 0", "`host_memory_gb`", 10),
        (GOOD, "flops: 989e12", "flops: .nan", "`device.flops`", 5),
        (GOOD, "flops: 989e12", "flops: fast", "`device.flops`", 5),
        (GOOD, "flops: 989e12", "flop: 989e12", "unknown key `device.flop`", 5),
        (GOOD, "train_eff", "trian_eff", "unknown key `device.calibration.trian_efficiency`", 8),
        (GOOD, "0.4", "1.4", "`device.calibration.train_efficiency`", 8),
        (GOOD, "{train_efficiency: 0.4}", "0.4", "`device.calibration`", 8),
        (GOOD, "  host:", "  hots:", "unknown key `links.hots`", 15),
        (GOOD, "hflow_cluster: 1", "hflow_cluster: 2", "`hflow_cluster`", 1),
        (GOOD, "name: test", "name: ''", "`name`", 2),
        (GOOD, "memory_gb: 80", "memory_gb: 80e9", "`device.memory_gb`", 6),
        (GOOD, "memory_gb: 80", f"memory_gb: {'9' * 400}", "`device.memory_gb`", 6),
        (GOOD, "memory_gb: 80", "memory_gb: 1e-300", "`device.memory_gb`", 6),
        (GOOD, "flops: 989e12", "flops: 1e300", "`device.flops`", 5),
        (
            GOOD,
            "inter_host: {bandwidth: 50e9",
            "inter_host: {bandwidth: 1e-9",
            "`links.inter_host.bandwidth`",
            13,
        ),
        (GOOD, "5e-6", "1e300", "`links.intra_host.latency`", 12),
        (
            GOOD,
            "{train_efficiency: 0.4}",
            "{train_efficiency: 1e-300}",
            "`device.calibration.train_efficiency`",
            8,
        ),
        (GOOD, "hosts: 2", "hosts: 1000000", "`hosts`", 9),
        (GOOD, "hosts: 2", "hosts: 16000", "128000 devices are more than", 9),
        (MIXED, "devices_per_host: 8", "devices_per_host: 0", "`groups.1.devices_per_host`", 9),
        (MIXED, "hosts: 3", "host: 3", "unknown key `groups.1.host`", 8),
        (MIXED, "312e12", "-312e12", "`groups.0.device.flops`", 4),
        (MIXED, "name: test", "hosts: 2", "unknown key `hosts`", 2),
    ],
)
def test_nonsense_is_refused_where_it_stands(
    text: str, old: str, new: str, message: str, line: int, tmp_path: Path
) -> None:
    assert text.count(old) >= 1
    with pytest.raises(HflowError) as caught:
        load_cluster(written(tmp_path, text.replace(old, new, 1)))
    found = [d for d in caught.value.diagnostics if message in d.message]
    assert [d.code for d in found] == ["HF301"]
    assert found[0].span and found[0].span.line == line


def test_no_groups_are_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(HflowError, match="HF301.*`groups`"):
        load_cluster(
            written(tmp_path, MIXED[: MIXED.index("groups")] + "groups: []\n" + MIXED[MIXED.index("links") :])
        )


def test_a_wrong_key_is_told_its_neighbour(tmp_path: Path) -> None:
    with pytest.raises(HflowError) as caught:
        load_cluster(written(tmp_path, GOOD.replace("memory_bandwidth", "memory_bandwith")))
    assert "did you mean `memory_bandwidth`?" in [d.help for d in caught.value.diagnostics]
