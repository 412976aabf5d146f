"""The decorator, and that every shipped op says what it is in both places."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import hflow.ops
from hflow.graph.infer.functions import read_function
from hflow.ops import op as op_module
from hflow.ops.op import op

MODULES = [importlib.import_module(f"hflow.ops.{m.name}") for m in pkgutil.iter_modules(hflow.ops.__path__)]
OPS = {
    f"{module.__name__}.{name}": function
    for module in MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and hasattr(function, "__hflow_signature__")
}


def test_the_documented_example() -> None:
    results = doctest.testmod(op_module)
    assert (results.failed, results.attempted) == (0, 2)


def test_op_leaves_the_function_as_it_is() -> None:
    def function() -> None: ...

    decorate = op("x: f32[rows*k] -> y: f32[]", whole_batch=True, min_group=2, needs={"c": "z"})
    assert decorate(function) is function
    assert vars(function) == {
        "__hflow_signature__": "x: f32[rows*k] -> y: f32[]",
        "__hflow_whole_batch__": True,
        "__hflow_min_group__": 2,
        "__hflow_needs__": {"c": "z"},
    }


def test_the_keywords_of_op_default_to_no_demand() -> None:
    function = op("x: f32[rows] -> y: f32[rows]")(lambda x: x)
    assert (vars(function)["__hflow_whole_batch__"], vars(function)["__hflow_min_group__"]) == (False, 1)


def test_whole_batch_is_asked_for_by_what_looks_across_rows() -> None:
    across = {name.removeprefix("hflow.ops.") for name, f in OPS.items() if f.__hflow_whole_batch__}
    assert across == {
        "baselines.moving_baseline",
        "constraints.lagrange_multiplier",
        "whitening.whiten",
        "whitening.whiten_scores",
    }


def test_groups_are_asked_for_by_what_compares_responses() -> None:
    """The same as `hflow check` reads from their source."""
    least = {name.removeprefix("hflow.ops."): f.__hflow_min_group__ for name, f in OPS.items()}
    assert {name: size for name, size in least.items() if size > 1} == {
        "advantages.group_normalise": 2,
        "advantages.leave_one_out": 2,
        "filters.mixed_groups": 2,
        "pairwise.bradley_terry": 2,
        "pairwise.cost": 2,
        "pairwise.pair_accuracy": 2,
        "preferences.dpo": 2,
    }
    assert all(read_function(name, Path()).min_group == f.__hflow_min_group__ for name, f in OPS.items())


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_has_a_docstring_that_says_what_it_returns(name: str) -> None:
    doc = inspect.getdoc(OPS[name])
    assert doc is not None and "Returns:" in doc and "Args:" in doc
