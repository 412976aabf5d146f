"""Do models that read the same tokens mean the same texts by them?

Tokens go from model to model as they are; nothing is tokenised again on the way. So the model that made a
text and those that score it or learn from it must have one vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from hflow.diagnostics import Diagnostic
from hflow.graph.graph import Graph, Node
from hflow.graph.regions import maker


def foreign_tokens(graph: Graph) -> Iterator[Diagnostic]:
    """HF308 for every node whose model reads tokens of another vocabulary.

    A folder without ``tokenizer.json`` says nothing, so nothing is said about it.
    """
    for node in graph.nodes:
        tokens = node.input("prompt") or node.input("tokens")
        writer = _writer(graph, tokens.type.dims[-1].factors[0].origin) if tokens and node.model else None
        if writer is None or node.model is None or tokens is None:
            continue
        reader = node.model.model
        paths = [graph.model(name).path for name in (writer, reader)]
        written, read = (_vocabulary(path) for path in paths) if paths[0] != paths[1] else (None, None)
        if written is not None and read is not None and written != read:
            message = (
                f"`{node.name}` gives `{reader}` the tokens of `{writer}`, and their vocabularies differ"
            )
            help_ = f"`{paths[0]}` and `{paths[1]}` need one tokenizer: texts are not tokenised again"
            yield Diagnostic("HF308", message, tokens.span or node.span, help_)


def _writer(graph: Graph, origin: str | None) -> str | None:
    """The model whose tokens a text has: that which sampled it, or whose tokenizer read the dataset."""
    nodes = {n.name: n for n in graph.nodes}
    node: Node | None = nodes.get(maker(origin)) if origin else None
    if node is None:
        return None
    return node.options.get("tokenizer") if node.op == "data" else node.model.model if node.model else None


@lru_cache(maxsize=64)
def _vocabulary(path: str) -> dict[str, int] | None:
    """Token to id of the tokenizer in a model's folder; None where it cannot be read."""
    try:
        tokenizer: dict[str, Any] = json.loads((Path(path) / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary: Any = tokenizer["model"]["vocab"]
        added: list[dict[str, Any]] = tokenizer.get("added_tokens") or []
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(vocabulary, list):  # Unigram: tokens with scores, in the order of their ids
        pairs: list[list[Any]] = vocabulary  # pyright: ignore[reportUnknownVariableType]
        vocabulary = {str(pair[0]): number for number, pair in enumerate(pairs)}
    return {**vocabulary, **{str(token["content"]): int(token["id"]) for token in added}}
