"""`Cluster` -> the text of a cluster file, which `load_cluster` reads back as the same cluster."""

from __future__ import annotations

from dataclasses import asdict

from hflow.graph.source.yaml_text import scalar
from hflow.plan.cluster import Cluster, HostGroup, Link
from hflow.plan.cluster_file import GB


def cluster_text(cluster: Cluster, remark: str = "") -> str:
    """The cluster's file, after a comment line with `remark`."""
    groups = [_group(group) for group in cluster.groups]
    hosts = ["groups:", *(line for g in groups for line in _item(g))] if cluster.more else groups[0]
    links = [_link("intra_host", cluster.intra_host), _link("inter_host", cluster.inter_host)]
    links += [f"nics_per_host: {cluster.nics_per_host}"]
    links += [_link("host", cluster.host_link)] if cluster.host_link else []
    head = _lines({"hflow_cluster": 1, "name": cluster.name})
    memory = cluster.host_memory_bytes
    head += [] if memory is None else _lines({"host_memory_gb": memory / GB})
    of_servers: dict[str, str | int | float] = {"server_gb": cluster.server_bytes / GB}
    of_servers |= {"token_step": cluster.token_step_s} if cluster.token_step_s else {}
    of_servers |= {"whole_rows": True} if cluster.whole_rows else {}
    engines = _lines({"generate": cluster.generate_engine} | of_servers)
    engines += [_link("wake", cluster.wake)] if cluster.wake else []
    lines = [*head, *hosts, "links:", *_indented(links), "engines:", *_indented(engines)]
    return "\n".join([*([f"# {remark}"] if remark else []), *lines]) + "\n"


def _group(group: HostGroup) -> list[str]:
    kind = group.device
    device: dict[str, str | int | float] = {
        "kind": kind.name,
        "platform": kind.platform,
        "flops": kind.flops,
        "memory_gb": kind.memory_bytes / GB,
        "reserve": kind.reserve_bytes / kind.memory_bytes,
        "overhead_gb": kind.overhead_bytes / GB,
        "memory_bandwidth": kind.memory_bandwidth,
        "efficiency": kind.efficiency,
        "layer_overhead": kind.layer_overhead_s,
        "kernel_latency": kind.kernel_latency_s,
    }
    if_known = {
        "bf16_flops": kind.bf16_flops,
        "score_layer_overhead": kind.score_layer_overhead_s,
        "train_layer_overhead": kind.train_layer_overhead_s,
    }
    device |= {name: value for name, value in if_known.items() if value is not None}
    given = {share: value for share, value in asdict(kind.calibration).items() if value is not None}
    shares = _indented(["calibration:", *_indented(_lines(given))])
    hosts = _lines({"hosts": group.hosts, "devices_per_host": group.devices_per_host})
    return ["device:", *_indented(_lines(device)), *shares, *hosts]


def _link(name: str, link: Link) -> str:
    return f"{name}: {{bandwidth: {_number(link.bandwidth)}, latency: {_number(link.latency_s)}}}"


def _lines(keys: dict[str, str | int | float]) -> list[str]:
    return [f"{k}: {_number(v) if isinstance(v, float) else scalar(v)}" for k, v in keys.items()]


def _number(value: float) -> str:
    """Six digits, as people write numbers, where that is exact."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _item(lines: list[str]) -> list[str]:
    first, *rest = lines
    return [f"  - {first}", *_indented(_indented(rest))]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
