"""Cluster files: YAML -> `Cluster`, every wrong value with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hflow.compiler.cluster import Cluster, DeviceKind, Link
from hflow.diagnostics import Diagnostic, HflowError, did_you_mean, ordered
from hflow.graph.source import Document, KeyPath, read
from hflow.shipped import find

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0, le=1_000_000)]
GB = 10**9


class _Base(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Link(_Base):
    bandwidth: Positive
    latency: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Links(_Base):
    intra_host: _Link
    inter_host: _Link


class _Device(_Base):
    kind: Annotated[str, Field(min_length=1)]
    platform: Literal["cpu", "cuda"] | None = None
    flops: Positive
    memory_gb: Positive
    memory_bandwidth: Positive
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.5
    layer_overhead: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class _ClusterFile(_Base):
    hflow_cluster: Literal[1]
    name: Annotated[str, Field(min_length=1)]
    device: _Device
    hosts: Count
    devices_per_host: Count
    links: _Links


def load_cluster(name: str | Path) -> Cluster:
    """The cluster that a file describes: a path, or the name of a file in a ``clusters`` folder.

    Raises:
        HflowError: HF001-HF005 (text), HF301 for every missing, unknown or impossible value.
    """
    document = read(find(name, "clusters", "cluster file"))
    try:
        file = _ClusterFile.model_validate(document.plain(), strict=False)
    except ValidationError as error:
        found = ordered(_diagnostic(document, e["loc"], e["type"], e["msg"]) for e in error.errors())
        raise HflowError(found) from None
    device, links = file.device, file.links
    return Cluster(
        name=file.name,
        device=DeviceKind(
            name=device.kind,
            platform=device.platform or ("cpu" if device.kind == "cpu" else "cuda"),
            flops=device.flops,
            memory_bytes=int(device.memory_gb * GB),
            memory_bandwidth=device.memory_bandwidth,
            efficiency=device.efficiency,
            layer_overhead_s=device.layer_overhead,
        ),
        hosts=file.hosts,
        devices_per_host=file.devices_per_host,
        intra_host=Link(links.intra_host.bandwidth, links.intra_host.latency),
        inter_host=Link(links.inter_host.bandwidth, links.inter_host.latency),
    )


_KEYS: dict[KeyPath, type[BaseModel]] = {
    (): _ClusterFile,
    ("device",): _Device,
    ("links",): _Links,
    ("links", "intra_host"): _Link,
    ("links", "inter_host"): _Link,
}


def _diagnostic(document: Document, path: KeyPath, kind: str, message: str) -> Diagnostic:
    where = ".".join(map(str, path)) or "file"
    if kind == "extra_forbidden":
        help_ = did_you_mean(str(path[-1]), _KEYS[path[:-1]].model_fields, "keys")
        return Diagnostic("HF301", f"unknown key `{where}`", document.span(path, key=True), help_)
    if kind == "missing":
        return Diagnostic("HF301", f"missing key `{where}`", document.span(path))
    value = document.get(path)
    text = f" (got {value.plain()!r})" if value else ""
    return Diagnostic("HF301", f"`{where}`: {message.lower()}{text}", document.span(path))
