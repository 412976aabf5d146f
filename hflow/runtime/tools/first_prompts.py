"""The first rows of a graph's data nodes as models read them, and which of their tokens are learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date

from hflow.graph.ir import Graph, Node
from hflow.graph.row_sources import streaming
from hflow.plan.chat_dates import with_dates
from hflow.runtime.engines.python.data import open_source
from hflow.runtime.engines.python.examples import Example
from hflow.runtime.engines.python.streamed import open_streamed
from hflow.runtime.tokenizer import Tokenizer, load_tokenizer

OPEN, CLOSE = "«", "»"  # around what is learned
_SHOWN = ("\n", "\t")


def first_prompts(graph: Graph, count: int, today: date | None = None) -> Iterator[str]:
    """A text for each of the first `count` rows, in file order, of every data node with tokens; held-out rows
    are not among them. What is learned stands between « and ».

    Args:
        today: what chat templates write that ask for the date; default: the present day.

    Raises:
        HflowError: HF406 for a model folder, HF403 for data that cannot be read.
    """
    graph = with_dates(graph, today or date.today())
    tokenizers: dict[str, Tokenizer] = {}
    paths = {model.name: model.path for model in graph.models}
    for node in (n for n in graph.nodes if n.op == "data" and n.options.get("tokenizer")):
        name = node.options["tokenizer"]
        tokenizers.setdefault(name, load_tokenizer(paths[name]))
        opened = open_streamed if streaming(node.options) else open_source
        for row in opened(node, tokenizers).first(count):
            yield from _texts(node, row, tokenizers[name])


def _texts(node: Node, row: Example, tokenizer: Tokenizer) -> Iterator[str]:
    head = f"{node.name}, row {row.number}: "
    if not row.responses:
        yield f"{head}{len(row.prompt)} tokens\n{_text(tokenizer, row.prompt)}\n"
    for number, response in enumerate(row.responses):
        mask = row.masks[number] if row.masks else (True,) * len(response)
        counts = f"{len(row.prompt) + len(response)} tokens, {sum(mask)} learned"
        text = _text(tokenizer, row.prompt) + _marked(tokenizer, response, mask)
        yield f"{head}{counts}\n{text}\n"


def _marked(tokenizer: Tokenizer, response: Sequence[int], mask: Sequence[bool]) -> str:
    """The response in parts of one kind, each decoded by itself."""
    out, start = "", 0
    for end in range(1, len(response) + 1):
        if end < len(response) and mask[end] == mask[start]:
            continue
        part = _text(tokenizer, response[start:end])
        out += f"{OPEN}{part}{CLOSE}" if mask[start] else part
        start = end
    return out


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Without control characters, which a terminal would obey."""
    text = tokenizer.fast.backend_tokenizer.decode(list(tokens), skip_special_tokens=False)
    return "".join(c if c in _SHOWN or c.isprintable() else "�" for c in text)
