"""The engine of nodes that use no model: data and plain Python functions."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.diagnostics import HflowError
from hflow.graph.ir import Node
from hflow.runtime.engines.protocol import EngineCall, NodeError, Result
from hflow.runtime.engines.python.call import run_call
from hflow.runtime.engines.python.data import DataSource, open_source
from hflow.runtime.rows import Rows
from hflow.runtime.tokenizer import Tokenizer


class PythonEngine:
    """Executes `data` and `call` nodes of one worker.

    `tokenizers` maps each model's name to its tokenizer. A data source is opened once and kept; training and
    evaluation share it, so that they share the split.
    """

    def __init__(self, tokenizers: Mapping[str, Tokenizer]):
        self._tokenizers = tokenizers
        self._sources: dict[str, DataSource] = {}

    def run(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        """Execute a `data` or `call` node on the local rows.

        Raises:
            NodeError: HF403 when data cannot be read, HF205 when a function cannot be imported, HF401
                when it fails.
        """
        try:
            return run_call(call, inputs) if call.node.op == "call" else self.open(call.node).draw(call)
        except HflowError as error:
            first = error.diagnostics[0]
            place = f"{first.span.file}:{first.span.line}: " if first.span else ""
            help_ = f" ({first.help})" if first.help else ""
            raise NodeError(call.node.name, f"{place}{first.message}{help_}", first.code) from error

    def open(self, node: Node) -> DataSource:
        """The rows of a `data` node, read at the first call.

        Raises:
            HflowError: HF403 when they cannot be read.
        """
        if node.name not in self._sources:
            self._sources[node.name] = open_source(node, self._tokenizers)
        return self._sources[node.name]
