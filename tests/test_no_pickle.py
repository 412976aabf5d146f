"""Nothing in the package unpickles: who opens a pickle runs the code of who sent it.

Ray does so between controller and workers, over connections of its own. Handles to memory are given to SGLang
as pickles (`engines/sglang/share.py`), which the package only writes. A worker's process of functions opens
what that worker sends it over a socket that nobody else has; the worker opens nothing that comes back.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_walls import modules

MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# of torch.distributed, of pickle, of zmq
CALLS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "Unpickler", "unpickle", "send_pyobj", "recv_pyobj",
}  # fmt: skip
LOADERS = {"torch", "np", "numpy", "ForkingPickler"}  # whose `load` and `loads` may unpickle


def unpickling(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            *owner, name = ast.unparse(node.func).split(".")
            if name in CALLS or (name in ("load", "loads") and {*owner} & LOADERS):
                yield ast.unparse(node.func)


@pytest.mark.slow
def test_nothing_in_the_package_unpickles() -> None:
    found = {name: lines for name, module in modules().items() if (lines := [*unpickling(module)])}
    assert found == {"hflow.runtime.engines.python.remote_call": ["pickle"]}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "import cloudpickle as p", "from pickle import loads", "import json, marshal",
        "dist.all_gather_object(found, own, group=group)", "torch.distributed.broadcast_object_list(told)",
        "torch.load(file, weights_only=False)", "np.load(file, allow_pickle=True)",
        "ForkingPickler.loads(text)",
    ],
)  # fmt: skip
def test_unpickling_is_noticed(line: str) -> None:
    assert [*unpickling(ast.parse(f"def f():\n    {line}"))]


@pytest.mark.parametrize("line", ["import json", "json.loads(text)", "ForkingPickler(buffer).dump(value)"])
def test_other_lines_pass(line: str) -> None:
    assert not [*unpickling(ast.parse(line))]
