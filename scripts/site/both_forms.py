"""Graph files in the text of a page, with the same in Python beside them."""

from __future__ import annotations

import re

from hflow.diagnostics import HflowError
from hflow.graph.builder.python_printer import to_python
from hflow.graph.load import assembled, check_document
from hflow.graph.source.document import parse
from scripts.site.sitemap import ROOT

WHOLE = re.compile(r"^```yaml\n((?:#.*\n)*hflow: 1\n.*?)^```\n", re.MULTILINE | re.DOTALL)


def with_python(text: str, source: str) -> str:
    """The text of the page `source`: each right graph in it, whole or extending another one, as two tabs.
    What is wrong, or a part of a file, stays as it is."""
    folder = ROOT / "algorithms" if source.startswith("algorithms/") else ROOT
    return WHOLE.sub(lambda found: _both(found[0], found[1], str(folder / "graph.yaml")), text)


def _both(block: str, graph: str, file: str) -> str:
    try:
        document = parse(graph, file)
        check_document(document)
    except HflowError:
        return block
    return tab("Graph file", "yaml", graph) + "\n" + tab("Python", "python", to_python(assembled(document)))


def tab(title: str, language: str, text: str) -> str:
    """A tab with code; those that follow each other are one set."""
    lines = [f"```{language}", *text.rstrip("\n").split("\n"), "```"]
    return "\n".join([f'=== "{title}"', "", *(f"    {line}".rstrip() for line in lines), ""])
