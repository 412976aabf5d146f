"""What it costs that users' functions run in a process of their own: per call, at the start, in memory.

    python benchmarks/functions.py [--times 30] [--save]

A `call` node of 512 rows of 1,024 tokens, by functions that do next to nothing: one reads tokens, one texts
of 4 bytes a token, one reads log-probs and returns as many. Least time of calls in this process and in the
other one, in turn, of one thread each, in milliseconds: what else runs here only adds to it. `sent_mib` is
what travels there and back, `start_s` the least time from a start until it answers, disks being warm, and
`memory_mib` what its two processes share with nobody (USS). The last line is one JSON object; with --save it
also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import torch

from hflow.graph.ir import Function, Input, Node, Output, Ref
from hflow.graph.types import ValueType, parse_type
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.runtime.engines.protocol import EngineCall, Result
from hflow.runtime.engines.python.call import run_call
from hflow.runtime.engines.python.function_process import FunctionProcess
from hflow.runtime.rows import Rows, from_strings

ROOT = Path(__file__).resolve().parent
ROWS, TOKENS, BYTES_PER_TOKEN = 512, 1024, 4
STARTS = 5
LENGTHS = torch.full((ROWS,), TOKENS)
FILE = """
def of_tokens(tokens): return tokens[:, 0].float()
def of_texts(text): return [float(len(t)) for t in text]
def of_logprobs(logprobs): return logprobs
"""
TYPES = {
    "tokens": ("i32[rows, seq~]", "f32[rows]"),
    "text": ("str[rows]", "f32[rows]"),
    "logprobs": ("f32[rows, resp~]", "f32[rows, resp~]"),
}
FUNCTIONS = {"tokens": "of_tokens", "text": "of_texts", "logprobs": "of_logprobs"}
Run = Callable[[EngineCall, Mapping[str, Rows]], Result]


def main() -> None:
    parser = argparse.ArgumentParser(description="Calls of functions in this process and in one of theirs.")
    parser.add_argument("--times", type=int, default=30, help="calls of which the fastest counts")
    parser.add_argument("--save", action="store_true", help="also write results/functions-DATE.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "functions.py"
        file.write_text(FILE)
        report = measured(file, options.times)
    line = json.dumps({"benchmark": "functions", "rows": ROWS, "tokens": TOKENS, **report})
    if options.save:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        (ROOT / f"results/functions-{date}.json").write_text(line + "\n")
    print(line)


def measured(file: Path, times: int) -> dict[str, object]:
    torch.set_num_threads(1)
    starts = [start(file) for _ in range(STARTS)]
    for _, process in starts[1:]:
        process.end()
    process = starts[0][1]
    try:
        calls = {port: compared(process, *case(file, port), times) for port in TYPES}
        memory_mib = round(memory_bytes() / 2**20)
        return {"start_s": min(s for s, _ in starts), "memory_mib": memory_mib, "calls": calls}
    finally:
        process.end()


def start(file: Path) -> tuple[float, FunctionProcess]:
    """A process that has answered once, and the seconds until then."""
    began = time.perf_counter()
    process = FunctionProcess([], threading.Event())
    process.run(*case(file, "tokens"))
    return round(time.perf_counter() - began, 2), process


def case(file: Path, port: str) -> tuple[EngineCall, dict[str, Rows]]:
    read, made = (parse_type(text) for text in TYPES[port])
    node = Node(
        "measured",
        "call",
        function=Function(f"{file}:{FUNCTIONS[port]}", f"{port}: {read} -> out: {made}"),
        inputs=(Input(port, Ref("source", port), read),),
        outputs=(Output("out", made),),
    )
    plan = NodePlan(node.name, node.op, None, "python", Mesh.of((0,)), 1, 0.0, 0.0, 0)
    return EngineCall(node, plan, 0, ROWS, seed=0, step=0), {port: values(read)}


def values(type_: ValueType) -> Rows:
    if type_.dtype == "str":
        return from_strings(["x" * TOKENS * BYTES_PER_TOKEN] * ROWS)
    dtype = torch.int32 if type_.dtype == "i32" else torch.float32
    return Rows(torch.ones(ROWS * TOKENS, dtype=dtype), LENGTHS)


def compared(
    process: FunctionProcess, call: EngineCall, inputs: Mapping[str, Rows], times: int
) -> dict[str, float]:
    """The least of each in milliseconds."""
    ways: dict[str, Run] = {"here": run_call, "apart": process.run}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(times):
        for name, run in ways.items():
            began = time.perf_counter()
            result = run(call, inputs)
            taken[name].append(1000 * (time.perf_counter() - began))
    found = {f"{name}_ms": round(min(each), 2) for name, each in taken.items()}
    sent = sum(size_bytes(rows) for each in (inputs, result.outputs) for rows in each.values())
    extra = round(found["apart_ms"] - found["here_ms"], 2)
    return {**found, "extra_ms": extra, "sent_mib": round(sent / 2**20, 1)}


def size_bytes(rows: Rows) -> int:
    return sum(t.nbytes for t in (rows.values, rows.lengths) if t is not None)


def memory_bytes() -> int:
    return sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))


if __name__ == "__main__":
    main()
