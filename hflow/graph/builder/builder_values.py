"""What the builder's calls return: names of models, of nodes, and of the values that nodes make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelHandle:
    """A model of the graph under construction."""

    name: str


@dataclass(frozen=True)
class NodeOutput:
    """An output of a node: `node.port`."""

    node: str
    port: str

    def __str__(self) -> str:
        return f"{self.node}.{self.port}"


@dataclass(frozen=True)
class CarriedOutput:
    """A value as it was `lag` steps ago; `init` before there was one."""

    value: str
    lag: int
    init: float | str


class NodeHandle:
    """A node of the graph under construction. Its attributes are its outputs: ``rollout.tokens``."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, port: str) -> NodeOutput:
        if port.startswith("_"):
            raise AttributeError(port)
        return NodeOutput(self._name, port)

    def __getitem__(self, port: str) -> NodeOutput:
        """An output whose name is no attribute: ``node["until"]``."""
        return NodeOutput(self._name, port)

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"<node {self._name}>"


class RegionHandle(NodeHandle):
    """A region of the graph under construction; what it hands out are its attributes."""

    def __init__(self, name: str, write: Callable[[str, Any], None]):
        super().__init__(name)
        self._write = write

    def until(self, *, rows: int | str, keep: NodeOutput | str, max_age: int | str = 0) -> None:
        """Rounds go on until `rows` rows are collected for which the value `keep` is true; a surplus serves
        the next steps while its samples are no more than `max_age` updates old."""
        age = {"max_age": max_age} if max_age else {}
        self._write("until", {"rows": rows, "keep": str(keep), **age})

    def out(self, **values: NodeOutput | str) -> None:
        """What the region hands out, of the rows that it collected."""
        self._write("out", {port: str(value) for port, value in values.items()})
