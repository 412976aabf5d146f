"""The engine of nodes that use no model: data and plain Python functions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from torch import Tensor

from hflow.diagnostics import HflowError
from hflow.graph.infer.kinds.call import time_limit_s
from hflow.graph.ir import Node, evaluation_of, step_node
from hflow.graph.row_sources import SUCCESS, filter_functions, streaming, success_curriculum
from hflow.plan.run_state import DATA_STATE
from hflow.runtime.engines.protocol import EngineCall, NodeError, Result
from hflow.runtime.engines.python.call import run_call
from hflow.runtime.engines.python.data import DataSource, open_source
from hflow.runtime.engines.python.function_process import FunctionProcess
from hflow.runtime.engines.python.streamed import StreamedSource, open_streamed
from hflow.runtime.rows import Rows
from hflow.runtime.success_rates import SuccessRates
from hflow.runtime.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


class PythonEngine:
    """Executes `data` and `call` nodes of one worker.

    `tokenizers` maps each model's name to its tokenizer. A data source is opened once and kept; training and
    evaluation share it, so that they share the split. `process`: where functions run that need one of their
    own (`runs_apart`); None: here, and then nothing enforces `timeout_s`.
    """

    def __init__(self, tokenizers: Mapping[str, Tokenizer], process: FunctionProcess | None = None):
        self._tokenizers = tokenizers
        self._sources: dict[tuple[str, str], DataSource | StreamedSource] = {}
        self._process = process
        self._warned = False
        self._rates: dict[str, SuccessRates] = {}

    def tokenizer(self, model: str) -> Tokenizer:
        return self._tokenizers[model]

    def run(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        """Execute a `data` or `call` node on the local rows.

        Raises:
            NodeError: HF403 when data cannot be read, HF205 when a function cannot be imported, HF401
                when it fails.
            Stopped: nobody waits for the result any more.
        """
        if call.node.op == "call":
            return self._call(call, inputs)
        try:
            return self._draw(call, inputs)
        except HflowError as error:
            first = error.diagnostics[0]
            place = f"{first.span.file}:{first.span.line}: " if first.span else ""
            help_ = f" ({first.help})" if first.help else ""
            raise NodeError(call.node.name, f"{place}{first.message}{help_}", first.code) from error

    def open(self, node: Node) -> DataSource | StreamedSource:
        """The rows of a `data` node, read at the first call, of those that are streamed the first ones. A
        named evaluation that holds rows out has those of the step's node, which is opened before.

        Raises:
            HflowError: HF403 when they cannot be read.
            NodeError: when the function of a filter fails.
        """
        options = {name: value for name, value in node.options.items() if name != "batch"}
        is_streamed = streaming(node.options) is not None
        key = node.name if is_streamed else step_node(node.name), repr(sorted(options.items()))
        if key not in self._sources:
            opened = open_streamed if is_streamed else open_source
            self._sources[key] = opened(node, self._tokenizers, self._call)
        found = self._sources[key]
        if evaluation_of(node.name) and not node.options["holdout"]:  # another one may have opened it
            found.require(node.options["batch"], evaluation_of(node.name))
        return found

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """What later steps need, by names of `hflow.plan.run_state`."""
        for node, drawing in (*self._rates.items(), *self._streams()):
            yield from ((f"{DATA_STATE}/{node}/{name}", values) for name, values in drawing.tensors())

    def restore(self, node: Node, kept: Mapping[str, Tensor]) -> None:
        """Set what `state` has told of a `data` node, by the last part of the names.

        Raises:
            HflowError: HF403 when the rows cannot be read.
            ValueError: it is of other rows.
        """
        source = self.open(node)
        (source if isinstance(source, StreamedSource) else self._rates_of(node)).restore(kept)

    def _streams(self) -> Iterator[tuple[str, StreamedSource]]:
        """Rows of the step that are streamed, by their nodes; those of evaluations begin anew each time."""
        for (node, _), source in self._sources.items():
            if isinstance(source, StreamedSource) and not evaluation_of(source.node.name):
                yield node, source

    def _draw(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        source = self.open(call.node)
        if isinstance(source, StreamedSource) or call.evaluation or not success_curriculum(call.node.options):
            return source.draw(call)
        rates = self._rates_of(call.node)
        rates.count(inputs[SUCCESS].values)
        return source.draw(call, rates)

    def _rates_of(self, node: Node) -> SuccessRates:
        if node.name not in self._rates:
            curriculum = success_curriculum(node.options)
            source = self.open(node)
            assert curriculum and isinstance(source, DataSource)
            self._rates[node.name] = SuccessRates.of(curriculum, len(source.dataset.train))
        return self._rates[node.name]

    def _call(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        if self._process and runs_apart(call.node):
            return self._process.run(call, inputs)
        if time_limit_s(call.node) and not self._warned:
            _LOG.warning("%s: nothing enforces `timeout_s` in this process", call.node.name)
            self._warned = True
        return run_call(call, inputs)


def runs_apart(node: Node) -> bool:
    """Whether the function of a `call` node needs a process that may be ended: it is not hflow's own, or has
    a time limit."""
    assert node.function is not None
    return not node.function.reference.startswith("hflow.") or time_limit_s(node) is not None


def apart(node: Node) -> tuple[str, ...]:
    """The functions of a node that need a process that may be ended: of a `call`, or of filters of rows."""
    if node.op == "data":
        return tuple(f for f in filter_functions(node.options) if not f.startswith("hflow."))
    return (node.function.reference,) if node.op == "call" and node.function and runs_apart(node) else ()
