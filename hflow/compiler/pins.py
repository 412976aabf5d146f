"""``--pin NODE=tp2,dp2,zero1@0-3``: how and where a node runs, fixed by the user.

``NODE@EVALUATION`` is a node of a named evaluation, which runs as the node of the step does unless it is
pinned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.graph.ir import Graph, Node, evaluation_of, step_node
from hflow.plan.cluster import Cluster
from hflow.plan.engine_registry import DEFAULT_ENGINE, profile_of

_SIZE = re.compile(r"^(pp|dp|cp|tp)([1-9]\d*)$")
_NUMBER = re.compile(r"^(zero|ep|etp|micro|vpp)(\d+)$")
_SWITCHES = {
    "recompute": ("recompute", True),
    "no-recompute": ("recompute", False),
    "offload": ("offload", True),
    "no-offload": ("offload", False),
    "sp": ("sp", True),
    "no-sp": ("sp", False),
    "share-forward": ("share_forward", True),
    "no-share-forward": ("share_forward", False),
}
_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")


@dataclass(frozen=True)
class Pin:
    """`sizes` holds the axes that were given; what was not given is None."""

    node: str
    sizes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...] | None
    text: str
    zero: Literal[0, 1, 3] | None = None
    ep: int | None = None
    etp: int | None = None
    micro: int | None = None
    recompute: bool | None = None
    offload: bool | None = None
    sp: bool | None = None
    vpp: int | None = None
    share_forward: bool | None = None


def parse_pins(texts: Iterable[str], graph: Graph, cluster: Cluster) -> tuple[Pin, ...]:
    """Read and check pins against the graph and the cluster.

    Raises:
        HflowError: HF302 with one diagnostic per bad pin.
    """
    pins: list[Pin] = []
    bad: list[Diagnostic] = []
    for text in texts:
        try:
            pins.append(_parse(text, graph, cluster))
        except ValueError as error:
            message, help_ = error.args if len(error.args) == 2 else (error.args[0], "")
            bad.append(Diagnostic("HF302", f"--pin {text}: {message}", help=help_))
    bad += [
        Diagnostic("HF302", f"--pin {pin.text}: `{pin.node}` is pinned twice")
        for i, pin in enumerate(pins)
        if any(other.node == pin.node for other in pins[:i])
    ]
    if bad:
        raise HflowError(bad)
    return tuple(pins)


def _parse(text: str, graph: Graph, cluster: Cluster) -> Pin:
    name, _, rest = text.partition("=")
    settings, _, devices_text = rest.partition("@")
    words = [word.strip() for word in settings.split(",") if word.strip()]
    sizes = [match for word in words if (match := _SIZE.match(word))]
    if not words and "@" not in rest:
        raise ValueError("not of the form NODE=tp2,dp2@0-3", "sizes, devices, or both may be given")
    node = _evaluated_node(name, graph) if evaluation_of(name) else placed_node(name, graph)
    devices = _devices(devices_text, cluster) if "@" in rest else None
    strategy = _strategy(word for word in words if not _SIZE.match(word))
    _check_strategy(strategy, node)
    if strategy.get("offload"):
        _check_offload(node, graph, cluster)
    return Pin(name, _sizes(sizes), devices, text, **strategy)


def placed_node(name: str, graph: Graph) -> Node:
    """The node `name`, which has a model. Raises ValueError with a message and a help if there is none."""
    names = [n.name for n in graph.nodes]
    if name not in names:
        raise ValueError(f"no node `{name}`", did_you_mean(name, names, "nodes"))
    node = graph.node(name)
    if node.model is None:
        models = ", ".join(n.name for n in graph.nodes if n.model)
        raise ValueError(f"`{name}` runs where its values lie", f"nodes with a place of their own: {models}")
    return node


def _evaluated_node(name: str, graph: Graph) -> Node:
    """The node `name` of a named evaluation, to which weights can move. Raises ValueError as `placed_node`
    does."""
    nodes = {node.name: node for named in graph.evaluations for node in named.nodes}
    placed = [node.name for node in nodes.values() if node.model]
    if name not in nodes:
        known = did_you_mean(name, placed, "nodes") or "the graph has no named evaluations"
        raise ValueError(f"no node `{name}` in an evaluation", known)
    node = nodes[name]
    if node.model is None:
        known = f"nodes with a place of their own: {', '.join(placed)}"
        raise ValueError(f"`{name}` runs where its values lie", known)
    if not graph.trainers(node.model.model):
        message = f"`{node.model.model}` is not trained, so no weights move to `{name}`"
        raise ValueError(message, f"it runs where `{step_node(name)}` does: pin that")
    return node


def _strategy(words: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in map(_setting, words):
        if key in found:
            raise ValueError(f"`{key}` is given twice")
        found[key] = value
    return found


def _setting(word: str) -> tuple[str, Any]:
    if word in _SWITCHES:
        return _SWITCHES[word]
    match = _NUMBER.match(word)
    if not match:
        known = "sizes are pp, dp, cp or tp with a number: tp2; "
        known += "also zero0, zero1, ep8, etp1, vpp2, micro4, recompute, offload, sp, share-forward"
        raise ValueError(f"`{word}` is no size", known)
    return match[1], int(match[2])


def _check_strategy(strategy: dict[str, Any], node: Node) -> None:
    """Refuses settings that no node, or not this one, can have."""
    if strategy.get("zero", 0) not in (0, 1, 3):
        raise ValueError(f"zero{strategy['zero']} is none of zero0, zero1, zero3")
    if 0 in map(strategy.get, ("ep", "etp", "micro", "vpp")):
        raise ValueError("ep, etp, vpp and micro are at least 1")
    kept = sorted({"zero", "recompute", "offload", "sp", "share_forward"} & strategy.keys())
    if kept and evaluation_of(node.name):
        word = kept[0].replace("_", "-")
        raise ValueError(
            f"`{word}` is for nodes of the step", "an evaluation's has sizes, devices, ep, etp and micro"
        )
    if "share_forward" in strategy and node.op not in ("score", "train"):
        raise ValueError(
            f"`share-forward` is for score and train nodes, and `{node.name}` is a {node.op} node"
        )
    if strategy.get("sp") and node.op not in profile_of(DEFAULT_ENGINE).cuts_rows:
        raise ValueError(f"`sp` is for score and train nodes, and `{node.name}` is a {node.op} node")
    own = sorted({"zero", "recompute", "vpp"} & strategy.keys())
    if own and node.op != "train":
        raise ValueError(f"`{own[0]}` is for train nodes, and `{node.name}` is a {node.op} node")


def _check_offload(node: Node, graph: Graph, cluster: Cluster) -> None:
    """Refuses what cannot wait in the host's memory, or need not."""
    model = graph.model_of(node)
    trainers = graph.trainers(model.name)
    if cluster.host_link is None:
        raise ValueError(f"`{cluster.name}` has no link to the host's memory", "its file lacks `links.host`")
    if model.refresh:
        source = model.refresh.model
        raise ValueError(
            f"`{model.name}` takes over the weights of `{source}`, so its own stay on the devices"
        )
    if model.base and not trainers:
        raise ValueError(f"most weights of `{model.name}` are those of `{model.base}`, which stay")
    if trainers and node.op != "train":
        names = " or ".join(f"`{trainer.name}`" for trainer in trainers)
        raise ValueError(f"`{node.name}` reads weights that are trained", f"pin offload on {names}")


def _sizes(matches: Iterable[re.Match[str]]) -> tuple[tuple[str, int], ...]:
    sizes: dict[str, int] = {}
    for axis, size in (match.groups() for match in matches):
        if axis in sizes:
            raise ValueError(f"`{axis}` is given twice")
        sizes[axis] = int(size)
    return tuple(sorted(sizes.items()))


def _devices(text: str, cluster: Cluster) -> tuple[int, ...]:
    devices: list[int] = []
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if not match:
            raise ValueError(f"`{part}` is no device range", "write devices like 0-3 or 0,2")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= cluster.num_devices:
            known = f"0-{cluster.num_devices - 1}"
            raise ValueError(f"there is no device {last}", f"`{cluster.name}` has devices {known}")
        devices += range(first, last + 1)
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(f"`{text}` names a device twice, or none")
    if devices != sorted(devices):
        raise ValueError(f"`{text}` is not ascending", "hflow orders the devices of a mesh itself")
    return tuple(devices)
