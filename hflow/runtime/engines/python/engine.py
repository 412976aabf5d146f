"""The engine of nodes that use no model: data and plain Python functions."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.diagnostics import HflowError
from hflow.runtime.engines.base import Call, NodeError, Result
from hflow.runtime.engines.python.call import run_call
from hflow.runtime.engines.python.data import DataSource, open_source
from hflow.runtime.rows import Rows
from hflow.runtime.tokenizer import Tokenizer


class PythonEngine:
    """Executes `data` and `call` nodes of one worker.

    `tokenizers` maps each model's name to its tokenizer. A data source is opened at its first use and
    kept; training and evaluation share it, so that they share the split.
    """

    def __init__(self, tokenizers: Mapping[str, Tokenizer]):
        self._tokenizers = tokenizers
        self._sources: dict[str, DataSource] = {}

    def run(self, call: Call, inputs: Mapping[str, Rows]) -> Result:
        """Execute a `data` or `call` node on the local rows.

        Raises:
            NodeError: HF403 when data cannot be read, HF205 when a function cannot be imported, HF401
                when it fails.
        """
        try:
            return run_call(call, inputs) if call.node.op == "call" else self._source(call).draw(call)
        except HflowError as error:
            first = error.diagnostics[0]
            place = f"{first.span.file}:{first.span.line}: " if first.span else ""
            help_ = f" ({first.help})" if first.help else ""
            raise NodeError(call.node.name, f"{place}{first.message}{help_}", first.code) from error

    def _source(self, call: Call) -> DataSource:
        name = call.node.name
        if name not in self._sources:
            self._sources[name] = open_source(call.node, self._tokenizers)
        return self._sources[name]
