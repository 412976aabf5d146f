from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.infer.functions import find_module, read_function
from hflow.graph.options import REQUIRED, Option

HERE = Path()


def refused(reference: str, folder: Path = HERE) -> tuple[str, str, str]:
    with pytest.raises(HflowError) as caught:
        read_function(reference, folder)
    (problem,) = caught.value.diagnostics
    return problem.code, problem.message, problem.help


def write(folder: Path, body: str, signature: str = "a: f32[rows] -> b: f32[rows]") -> str:
    text = f'from typing import Literal\nfrom hflow.ops.op import op\n\n@op("{signature}")\n{body}\n'
    (folder / "functions.py").write_text(text)
    return "./functions.py:f"


OPS = sorted(
    f"hflow.ops.{file.stem}.{name}"
    for file in Path("hflow/ops").glob("*.py")
    for name in re.findall(r"^@op\(.*?^def (\w+)", file.read_text(), re.DOTALL | re.MULTILINE)
)


@pytest.mark.parametrize("reference", OPS)
def test_reading_agrees_with_importing(reference: str) -> None:
    source = read_function(reference, HERE)
    module, _, name = reference.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    parameters = inspect.signature(function).parameters.values()
    only_keyword = {
        p.name: REQUIRED if p.default is p.empty else p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }
    assert {o.name: o.default for o in source.options} == only_keyword
    assert [p.name for p in source.signature.inputs] == [
        p.name for p in parameters if p.kind is not p.KEYWORD_ONLY
    ]
    assert " ".join(function.__hflow_signature__.split()) == str(source.signature)
    assert source.whole_batch == getattr(function, "__hflow_whole_batch__", False)


@pytest.mark.parametrize("module", ["hflow.ops.rewards", "hflow.ops", "xml.etree.ElementTree", "json"])
def test_modules_are_found_where_python_finds_them(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec and str(find_module(module)) == spec.origin


def test_a_module_in_nested_namespace_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_ns" / "inner_ns").mkdir(parents=True)
    (tmp_path / "outer_ns" / "inner_ns" / "leaf.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_module("outer_ns.inner_ns.leaf") == tmp_path / "outer_ns" / "inner_ns" / "leaf.py"
    assert "outer_ns" not in sys.modules


def test_reading_runs_no_user_code(tmp_path: Path) -> None:
    reference = write(tmp_path, "def f(a):\n    return a\n\nraise SystemExit('imported')")
    assert read_function(reference, tmp_path).options == ()


@pytest.mark.parametrize(("argument", "whole_batch"), [("", False), ("False", False), ("True", True)])
def test_functions_of_the_whole_batch(tmp_path: Path, argument: str, whole_batch: bool) -> None:
    assert read_function(decorated(tmp_path, argument), tmp_path).whole_batch == whole_batch


@pytest.mark.parametrize("argument", ["1", "'yes'", "not False", "WHOLE"])
def test_what_reading_cannot_know_is_refused(tmp_path: Path, argument: str) -> None:
    assert refused(decorated(tmp_path, argument), tmp_path)[0] == "HF206"


def decorated(folder: Path, argument: str) -> str:
    keyword = f", whole_batch={argument}" if argument else ""
    text = f'@op("a: f32[rows] -> b: f32[rows]"{keyword})\ndef f(a):\n    return a\n'
    (folder / "functions.py").write_text(text)
    return "./functions.py:f"


def test_a_scalar_is_made_of_the_whole_batch(tmp_path: Path) -> None:
    body, signature = "def f(a):\n    return a", "a: f32[rows] -> b: f32[]"
    code, _, help_ = refused(write(tmp_path, body, signature), tmp_path)
    assert code == "HF206" and "whole_batch=True" in help_


def test_options_of_every_kind(tmp_path: Path) -> None:
    body = (
        "def f(a, *, i: int = 1, x: float = 1, on: bool = False, name: str = 'n', must: float,\n"
        "      mode: Literal['p', 'q'] = 'p', maybe: int | None = None, plain=2.5):\n    return a"
    )
    source = read_function(write(tmp_path, body), tmp_path)
    assert source.options == (
        Option("i", "int", 1),
        Option("x", "float", 1),
        Option("on", "bool", False),
        Option("name", "str", "n"),
        Option("must", "float", REQUIRED),
        Option("mode", "str", "p", choices=("p", "q")),
        Option("maybe", "int", None, nullable=True),
        Option("plain", "float", 2.5),
    )


def test_bounds_of_options(tmp_path: Path) -> None:
    body = (
        "def f(a, *, share: Annotated[float, Ge(0), Lt(1)] = 0.5, k: Annotated[int, annotated_types.Gt(0)],\n"
        "      high: Annotated[float, Le(-1)] | None = None):\n    return a"
    )
    source = read_function(write(tmp_path, body), tmp_path)
    assert source.options == (
        Option("share", "float", 0.5, least=0, below=1),
        Option("k", "int", REQUIRED, above=0),
        Option("high", "float", None, most=-1, nullable=True),
    )


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ("Annotated[float, Ge(0)] = -1", "default of `x` of `f` must be a finite number >= 0, got -1"),
        ("Annotated[float, Ge(LEAST)] = 1", "parameter `x` of `f` cannot be an option"),
        ("Annotated[float, Ge('a')] = 1", "parameter `x` of `f` cannot be an option"),
        ("Annotated[float, MultipleOf(2)] = 2", "parameter `x` of `f` cannot be an option"),
        ("Annotated[str, Ge(0)] = 'a'", "parameter `x` of `f` cannot be an option"),
    ],
)
def test_bounds_that_cannot_be_read(tmp_path: Path, annotation: str, message: str) -> None:
    code, said, _ = refused(write(tmp_path, f"def f(a, *, x: {annotation}):\n    return a"), tmp_path)
    assert (code, said) == ("HF206", message)


def test_a_file_is_relative_to_the_graph_file_and_named_from_where_hflow_runs(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text("")
    write(tmp_path, "def f(a):\n    return a")
    inside = Path("tests/bad")
    assert read_function("./functions.py:identity", inside).reference == "./tests/bad/functions.py:identity"
    assert (
        read_function("../bad/functions.py:identity", inside).reference == "./tests/bad/functions.py:identity"
    )
    assert read_function("./functions.py:f", tmp_path).reference == f"{tmp_path}/functions.py:f"


@pytest.mark.parametrize(
    ("reference", "message", "help_"),
    [
        ("exact_match", "does not name a function", "did you mean `hflow.ops.rewards.exact_match`?"),
        ("no_such_function", "does not name a function", "write `package.module.function`"),
        ("hflow.ops.rewards.", "does not name a function", ""),
        ("functions.py:f", "does not name a function", ""),
        ("hflow.opz.rewards.exact_match", "no module `opz` in `hflow`", "did you mean `ops`?"),
        ("hflow.ops.reward.exact_match", "no module `reward` in `hflow.ops`", "did you mean `rewards`?"),
        ("no_such_package_here.f", "no module `no_such_package_here` on the Python path", ""),
        ("hflow.ops.rewards.exact_mach", "has no function `exact_mach`", "did you mean `exact_match`?"),
        ("hflow.ops.op.op", "has no signature", "put `@op("),
        ("math.sqrt", "has no Python source", ""),
        ("./nothing.py:f", "cannot read", ""),
    ],
)
def test_functions_that_are_not_there(reference: str, message: str, help_: str) -> None:
    code, found, found_help = refused(reference)
    assert code == "HF205"
    assert message in found
    assert help_ in found_help


@pytest.mark.parametrize(
    "body",
    [
        "def f(b):\n    pass",
        "def f(a, c):\n    pass",
        "def f():\n    pass",
        "def f(a=None):\n    pass",
        "def f(*a):\n    pass",
        "def f(a, **more):\n    pass",
        "async def f(a):\n    pass",
        "def f(a, *, k):\n    pass",
        "def f(a, *, k: list = 1):\n    pass",
        "def f(a, *, k: float = 'x'):\n    pass",
        "def f(a, *, k: float = 2 * 3):\n    pass",
        "def f(a, *, k: str = '\\ud800'):\n    pass",
        "def f(a, *, k: Literal['p'] = 'q'):\n    pass",
    ],
)
def test_parameters_that_do_not_fit(tmp_path: Path, body: str) -> None:
    assert refused(write(tmp_path, body), tmp_path)[0] == "HF206"


def test_optional_inputs_default_to_none(tmp_path: Path) -> None:
    signature = "a: f32[rows], c?: f32[rows] -> b: f32[rows]"
    assert refused(write(tmp_path, "def f(a, c):\n    pass", signature), tmp_path)[0] == "HF206"
    source = read_function(write(tmp_path, "def f(a, c=None):\n    pass", signature), tmp_path)
    assert [p.optional for p in source.signature.inputs] == [False, True]


@pytest.mark.parametrize("text", ["def f(", "\x00", "x = " + "(" * 5000])
def test_files_that_are_no_python(tmp_path: Path, text: str) -> None:
    (tmp_path / "functions.py").write_text(text)
    assert refused("./functions.py:f", tmp_path)[0] == "HF205"
