"""From a worker's question to the answer of its process of functions, and back to a result."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping

import torch

from hflow.runtime.engines.protocol import EngineCall, NodeError, Result
from hflow.runtime.engines.python.call import run_call
from hflow.runtime.engines.python.function_channel import FunctionMessage, of_rows, to_rows
from hflow.runtime.rows import Rows


def question(call: EngineCall, inputs: Mapping[str, Rows]) -> FunctionMessage:
    """What to execute, with as many threads as this process has: sums depend on it.

    Pickled, since the process of functions believes its worker; the worker reads nothing pickled.
    """
    forms, tensors = of_rows(inputs)
    pickled = torch.frombuffer(bytearray(pickle.dumps(call)), dtype=torch.uint8)
    return FunctionMessage({"rows": forms, "threads": torch.get_num_threads()}, [pickled, *tensors])


def answer(asked: FunctionMessage) -> FunctionMessage:
    """Execute it here. Nothing that a function does is raised."""
    pickled, *tensors = asked.tensors
    call: EngineCall = pickle.loads(pickled.numpy().tobytes())
    if torch.get_num_threads() != asked.fields["threads"]:
        torch.set_num_threads(asked.fields["threads"])
    try:
        result = run_call(call, to_rows(asked.fields["rows"], tensors))
    except NodeError as error:
        return FunctionMessage({"error": error.message, "code": error.code, "trace": error.trace})
    except BaseException as error:  # the worker must hear of KeyboardInterrupt and the like, too
        problem, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        return FunctionMessage({"error": problem, "code": "HF401", "trace": trace})
    forms, tensors = of_rows(result.outputs)
    return FunctionMessage({"rows": forms, "metrics": dict(result.metrics)}, tensors)


def result_of(answered: FunctionMessage, node: str) -> Result:
    """Raises the NodeError that was answered."""
    fields = answered.fields
    if "error" in fields:
        raise NodeError(node, fields["error"], fields["code"], fields["trace"])
    metrics = {name: (total, weight) for name, (total, weight) in fields["metrics"].items()}
    return Result(to_rows(fields["rows"], answered.tensors), metrics)
