"""Collecting diagnostics about a document, by path instead of by place."""

from __future__ import annotations

from typing import Literal

from hflow.diagnostics import SET, Diagnostic
from hflow.graph.source.document import Document, KeyPath


class Problems:
    """Diagnostics found so far. Without a document they have no places."""

    def __init__(self, document: Document | None = None):
        self.document = document
        self.found: list[Diagnostic] = []

    def with_removal(self, help: str, path: KeyPath) -> str:
        """`help`, and how to remove the value at `path` if another file of the graph has it."""
        file = self.document.span(path, key=True).file if self.document else ""
        if not self.document or file == self.document.file or file.startswith(SET):
            return help
        removal = f"to remove what another file says, write `{path[-2]}: {{{path[-1]}: null}}`"
        return "; ".join(filter(None, [help, removal]))

    def add(
        self,
        code: str,
        message: str,
        path: KeyPath,
        *,
        key: bool = False,
        help: str = "",
        severity: Literal["error", "warning"] = "error",
    ) -> None:
        """Report `message` at the value at `path`, or at its key.

        Of a value that was computed from params, the help also tells where these are set.
        """
        span = self.document.span(path, key) if self.document else None
        if self.document and not key:
            help = "; ".join(filter(None, [help, self.document.where_set(path)]))
        self.found.append(Diagnostic(code, message, span, help, severity))
