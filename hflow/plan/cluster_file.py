"""Cluster files: YAML -> `Cluster`, every wrong value with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean, ordered
from hflow.graph.source.document import Document, KeyPath, read
from hflow.plan.cluster import Calibration, Cluster, DeviceKind, HostGroup, Link
from hflow.plan.engine_registry import DEFAULT_ENGINE, EngineChoice
from hflow.plan.implausible import implausible
from hflow.shipped import find

GB = 10**9
MAX_DEVICES = 16_384  # of a cluster; plans name every one
# Beyond these no machine lies, and products and sums of them stay finite.
Flops = Annotated[float, Field(ge=1.0, le=1e21, allow_inf_nan=False)]
Bandwidth = Annotated[float, Field(ge=1.0, le=1e18, allow_inf_nan=False)]
Gigabytes = Annotated[float, Field(ge=1e-3, le=1e6, allow_inf_nan=False)]
Overhead = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]  # gigabytes
Count = Annotated[int, Field(gt=0, le=MAX_DEVICES)]
Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=1e-6, le=1)]
Rest = Annotated[float, Field(ge=0, lt=1)]


class _Base(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Link(_Base):
    bandwidth: Bandwidth
    latency: Seconds


class _Links(_Base):
    intra_host: _Link
    inter_host: _Link
    host: _Link | None = None
    nics_per_host: Count = 1


class _Calibration(_Base):
    train_efficiency: Share | None = None
    score_efficiency: Share | None = None
    prefill_efficiency: Share | None = None
    decode_bandwidth_efficiency: Share | None = None
    decode_efficiency: Share | None = None
    weights_efficiency: Share | None = None


class _Device(_Base):
    kind: Annotated[str, Field(min_length=1)]
    platform: Literal["cpu", "cuda"] | None = None
    flops: Flops
    bf16_flops: Flops | None = None
    memory_gb: Gigabytes
    memory_bandwidth: Bandwidth
    reserve: Rest = 0.0
    overhead_gb: Overhead = 0.0
    efficiency: Share = 0.5
    layer_overhead: Seconds = 0.0
    score_layer_overhead: Seconds | None = None
    train_layer_overhead: Seconds | None = None
    kernel_latency: Seconds = 0.0
    calibration: _Calibration = _Calibration()

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        if self.overhead_gb >= self.memory_gb * (1 - self.reserve):
            raise ValueError("`reserve` and `overhead_gb` leave nothing of `memory_gb`")
        if self.bf16_flops and self.named_platform == "cuda":
            raise ValueError("`bf16_flops` is for CPUs; on `cuda` `flops` says how many there are in bf16")
        return self

    @property
    def named_platform(self) -> Literal["cpu", "cuda"]:
        return self.platform or ("cpu" if self.kind == "cpu" else "cuda")


class _Group(_Base):
    device: _Device
    hosts: Count
    devices_per_host: Count


class _Engines(_Base):
    generate: EngineChoice = DEFAULT_ENGINE
    server_gb: Overhead = 0.0
    token_step: Seconds = 0.0
    wake: _Link | None = None
    whole_rows: bool = False


class _ClusterFile(_Base):
    hflow_cluster: Literal[1]
    name: Annotated[str, Field(min_length=1)]
    links: _Links
    engines: _Engines = _Engines()
    host_memory_gb: Gigabytes | None = None


class _EqualHosts(_ClusterFile, _Group):
    """A file that describes one kind of host."""


class _MixedHosts(_ClusterFile):
    groups: Annotated[list[_Group], Field(min_length=1)]


def load_cluster(name: str | Path) -> Cluster:
    """The cluster that a file describes: a path, or the name of a file in a ``clusters`` folder.

    Raises:
        HflowError: HF001-HF005 (text), HF301 for every missing, unknown or impossible value.
    """
    return check_cluster(name)[0]


def check_cluster(name: str | Path) -> tuple[Cluster, tuple[Diagnostic, ...]]:
    """The cluster that a file describes, and warnings about numbers that are hardly meant so. As
    `load_cluster`."""
    document = read(find(name, "clusters", "cluster file"))
    form = _MixedHosts if "groups" in document.keys(()) else _EqualHosts
    try:
        file = form.model_validate(document.plain(), strict=True)
    except ValidationError as error:
        found = ordered(_diagnostic(document, form, e["loc"], e["type"], e["msg"]) for e in error.errors())
        raise HflowError(found) from None
    _check_size(document, file)
    cluster = _cluster(file)
    return cluster, ordered(implausible(document, [group.device.platform for group in cluster.groups]))


def _cluster(file: _EqualHosts | _MixedHosts) -> Cluster:
    first, *more = map(_group, file.groups if isinstance(file, _MixedHosts) else [file])
    links = file.links
    return Cluster(
        name=file.name,
        device=first.device,
        hosts=first.hosts,
        devices_per_host=first.devices_per_host,
        intra_host=_link(links.intra_host),
        inter_host=_link(links.inter_host),
        host_link=_link(links.host) if links.host else None,
        nics_per_host=links.nics_per_host,
        more=tuple(more),
        generate_engine=file.engines.generate,
        host_memory_bytes=None if file.host_memory_gb is None else round(file.host_memory_gb * GB),
        server_bytes=round(file.engines.server_gb * GB),
        token_step_s=file.engines.token_step,
        wake=_link(file.engines.wake) if file.engines.wake else None,
        whole_rows=file.engines.whole_rows,
    )


def _check_size(document: Document, file: _EqualHosts | _MixedHosts) -> None:
    groups = file.groups if isinstance(file, _MixedHosts) else [file]
    devices = sum(group.hosts * group.devices_per_host for group in groups)
    if devices > MAX_DEVICES:
        path = ("groups",) if isinstance(file, _MixedHosts) else ("hosts",)
        message = f"{devices} devices are more than the {MAX_DEVICES} that a cluster may have"
        raise HflowError(Diagnostic("HF301", message, document.span(path)))


def _group(group: _Group) -> HostGroup:
    return HostGroup(_device(group.device), group.hosts, group.devices_per_host)


def _link(link: _Link) -> Link:
    return Link(link.bandwidth, link.latency)


def _device(device: _Device) -> DeviceKind:
    return DeviceKind(
        name=device.kind,
        platform=device.named_platform,
        flops=device.flops,
        memory_bytes=round(device.memory_gb * GB),
        memory_bandwidth=device.memory_bandwidth,
        efficiency=device.efficiency,
        layer_overhead_s=device.layer_overhead,
        kernel_latency_s=device.kernel_latency,
        calibration=_calibration(device),
        reserve_bytes=round(device.memory_gb * GB * device.reserve),
        overhead_bytes=round(device.overhead_gb * GB),
        score_layer_overhead_s=device.score_layer_overhead,
        train_layer_overhead_s=device.train_layer_overhead,
        bf16_flops=device.bf16_flops,
    )


def _calibration(device: _Device) -> Calibration:
    """What is given; else `efficiency` for the shares of the peak FLOP/s."""
    given = device.calibration.model_dump(exclude_none=True)
    shares = ("train_efficiency", "score_efficiency", "prefill_efficiency")
    return Calibration(**{**dict.fromkeys(shares, device.efficiency), **given})


_MODELS: dict[str, type[BaseModel]] = {
    "device": _Device,
    "calibration": _Calibration,
    "links": _Links,
    "engines": _Engines,
    "intra_host": _Link,
    "inter_host": _Link,
    "host": _Link,
    "wake": _Link,
}


def _model_at(form: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    """What describes the keys of the mapping at `path`."""
    if not path:
        return form
    return _Group if isinstance(path[-1], int) else _MODELS[path[-1]]


def _diagnostic(
    document: Document, form: type[BaseModel], path: KeyPath, kind: str, message: str
) -> Diagnostic:
    where = ".".join(map(str, path)) or "file"
    if kind == "extra_forbidden":
        help_ = did_you_mean(str(path[-1]), _model_at(form, path[:-1]).model_fields, "keys")
        return Diagnostic("HF301", f"unknown key `{where}`", document.span(path, key=True), help_)
    if kind == "missing":
        return Diagnostic("HF301", f"missing key `{where}`", document.span(path))
    if kind == "value_error":  # of our own validators, whose message pydantic puts after these words
        message = message.removeprefix("Value error, ")
        return Diagnostic("HF301", f"`{where}`: {message}", document.span(path))
    value = document.get(path)
    text = f" (got {_short(value.plain())})" if value else ""
    help_ = "in units of 10^9 bytes" if path[-1:] == ("memory_gb",) else ""
    return Diagnostic("HF301", f"`{where}`: {message.lower()}{text}", document.span(path), help_)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
