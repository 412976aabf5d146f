"""Has every token a place in its model, and do models that read the same tokens mean the same texts by them?

Tokens go from model to model as they are; nothing is tokenised again on the way. So the model that made a
text and those that score it or learn from it must have one vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from hflow.bounded_read import UnreadableError, read_json
from hflow.diagnostics import Diagnostic
from hflow.graph.infer.regions import maker
from hflow.graph.ir import Graph, Node
from hflow.plan.model_shape import NAMED, ModelShape

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 2**28  # the largest published ones have a fifth of it


def tokens_beyond(graph: Graph, shapes: Mapping[str, ModelShape]) -> Iterator[Diagnostic]:
    """HF303 for every model whose tokenizer has a token without a row in the model's embedding.

    A folder without ``tokenizer.json`` says nothing, so nothing is said about it.
    """
    for model in (m for m in graph.models if not m.path.startswith(NAMED)):
        problem = beyond(token_ids(model.path) or {}, shapes[model.name].vocab)
        if problem:
            message = f"`{Path(model.path) / TOKENIZER}` does not fit model `{model.name}`: {problem}"
            help_ = "`vocab_size` in config.json counts the rows of the embedding"
            yield Diagnostic("HF303", message, model.span, help_)


def beyond(ids: Mapping[str, int], vocab: int) -> str:
    """Which of `ids` has no row in an embedding of `vocab` rows; empty when all have one."""
    outside = {token: number for token, number in ids.items() if not 0 <= number < vocab}
    if not outside:
        return ""
    token = max(outside, key=lambda token: abs(outside[token]))
    return f"token {token!r} has id {outside[token]}, and the embedding {vocab} rows"


def foreign_tokens(graph: Graph) -> Iterator[Diagnostic]:
    """HF308 for every node whose model reads tokens of another vocabulary.

    A folder without ``tokenizer.json`` says nothing, so nothing is said about it.
    """
    for node in graph.nodes:
        tokens = node.input("prompt") or node.input("tokens")
        if not (tokens and node.model):
            continue
        writer, reader = _writer(graph, tokens.type.dims[-1].factors[0].origin), node.model.model
        if writer is None:
            continue
        paths = [graph.model(name).path for name in (writer, reader)]
        written, read = (token_ids(path) for path in paths) if paths[0] != paths[1] else (None, None)
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


def token_ids(path: str) -> dict[str, int] | None:
    """Token to id of the ``tokenizer.json`` in folder `path`; None where there is none that can be read."""
    try:
        changed = (Path(path) / TOKENIZER).stat().st_mtime_ns
    except (OSError, ValueError):
        return None
    return _token_ids(path, changed)


@lru_cache(maxsize=64)
def _token_ids(path: str, changed: int) -> dict[str, int] | None:
    try:
        return ids_in(read_json(Path(path) / TOKENIZER, MAX_TOKENIZER_BYTES))
    except UnreadableError:
        return None


def ids_in(tokenizer: Any) -> dict[str, int] | None:
    """Token to id of what a ``tokenizer.json`` holds; None where it is not what such a file holds."""
    try:
        vocabulary: Any = tokenizer["model"]["vocab"]
        added: Any = tokenizer.get("added_tokens") or []
        if isinstance(vocabulary, list):  # Unigram: tokens with scores, in the order of their ids
            pairs = cast("list[Any]", vocabulary)
            vocabulary = {pair[0]: number for number, pair in enumerate(pairs)}
        found: dict[Any, Any] = {**vocabulary, **{token["content"]: token["id"] for token in added}}
    except (KeyError, TypeError, AttributeError, IndexError):
        return None
    whole = all(isinstance(k, str) and isinstance(v, int) for k, v in found.items())
    return found if whole else None
