"""The chat template that goes with an exported model: the file that its prompts were made with, if one was
named in place of the tokenizer's own."""

from __future__ import annotations

from pathlib import Path

from hflow.bounded_read import UnreadableError, read_text
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Graph

TEMPLATE = "chat_template.jinja"
MAX_BYTES = 2**24


def exported_template(graph: Graph) -> dict[str, str]:
    """By its name in the folder of the model; none where data nodes name no file, or different ones.

    Raises:
        HflowError: HF406 when it cannot be read any more.
    """
    named = {node.options.get("chat_template") or "" for node in graph.nodes if node.op == "data"}
    file = named.pop() if len(named) == 1 else ""
    if not file.endswith(".jinja"):
        return {}
    try:
        return {TEMPLATE: read_text(Path(file), MAX_BYTES)}
    except UnreadableError as error:
        message = f"`{file}`, by which the model was trained, cannot be read: {error}"
        help_ = f"an export carries its chat template; relative paths are looked for in `{Path.cwd()}`"
        raise HflowError(Diagnostic("HF406", message, help=help_)) from None
