"""Chat templates of several turns: what a conversation was begun with, its later turns go on with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hflow.graph.infer.kinds import chat
from hflow.graph.infer.regions import maker
from hflow.graph.ir import Node

INHERITED = ("chat_template", "template_args")


def inherit_chat(nodes: Mapping[str, Node]) -> dict[str, Node]:
    """The nodes, in which generate nodes with a `role` have the `chat_template` and the `template_args` of
    the data node that began their conversations, where they say none of their own."""
    return {name: _inherited(node, nodes) for name, node in nodes.items()}


def begun_by(node: Node, nodes: Mapping[str, Node]) -> Node | None:
    """The data node whose conversations a generate node answers, or goes on with; None where its prompts are
    none."""
    port = node.input("prompt") or node.input("tokens")
    origin = port.type.dims[-1].factors[0].origin if port else None
    before = nodes.get(maker(origin)) if origin else None
    if before is None or before.op != "data":
        return begun_by(before, nodes) if before and before.op == "generate" else None
    return before if chat.is_chat(before.options) else None


def _inherited(node: Node, nodes: Mapping[str, Node]) -> Node:
    if node.op != "generate" or "role" not in node.options:
        return node
    data = begun_by(node, nodes)
    if data is None:
        return node
    found = {
        name: data.options[name] for name in INHERITED if name in data.options and name not in node.options
    }
    return replace(node, options={**node.options, **found}) if found else node
