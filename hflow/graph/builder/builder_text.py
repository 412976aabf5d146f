"""From Python values and calls to the items of a graph file."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, cast

from hflow.bounded_read import is_broken_text
from hflow.diagnostics import Diagnostic, HflowError, Span, shown_path
from hflow.graph.builder.builder_values import CarriedOutput, ModelHandle, NodeHandle, NodeOutput
from hflow.graph.infer.functions import find_module
from hflow.graph.source.document import Item
from hflow.graph.source.extends import relative

_OURS = [Path(__file__).with_name(f"builder{part}.py") for part in ("", "_text", "_values")]
_PASSED = {*map(str, _OURS), contextlib.__file__}  # no call of the user's comes from here


def caller() -> Span:
    """The line of the user's Python file that is calling the builder."""
    frame: FrameType | None = inspect.currentframe()
    while frame and frame.f_code.co_filename in _PASSED:
        frame = frame.f_back
    assert frame
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).rstrip()
    column = len(line) - len(line.lstrip()) + 1
    return Span(shown_path(frame.f_code.co_filename), frame.f_lineno, column, max(len(line), column) + 1)


def item(value: Any, span: Span) -> tuple[Item, list[Diagnostic]]:
    """A Python value as an item of a graph file, all of it at `span`; HF103 for each part that a file cannot
    hold."""
    problems: list[Diagnostic] = []
    return _item(value, span, problems), problems


def _item(value: Any, span: Span, problems: list[Diagnostic]) -> Item:
    match value:
        case str() if is_broken_text(value):
            problems.append(
                Diagnostic("HF103", f"a graph file cannot hold the lone surrogate in {value!a}", span)
            )
            return Item(None, span, span)
        case None | bool() | int() | float() | str():
            return Item(value, span, span)
        case ModelHandle():
            return Item(value.name, span, span)
        case NodeHandle() | NodeOutput() | Path():
            return _item(str(value), span, problems)
        case CarriedOutput():
            parts = {"from": value.value, "lag": value.lag, "init": value.init}
            return _item(parts, span, problems)
        case Mapping():
            entries = cast("Mapping[Any, Any]", value)
            for key in filter(is_broken_text, map(str, entries)):
                _item(key, span, problems)
            return Item({str(k): _item(v, span, problems) for k, v in entries.items()}, span, span)
        case list() | tuple():
            parts = cast("list[Any]", value)
            return Item(tuple(_item(v, span, problems) for v in parts), span, span)
        case _:
            message = f"a graph file cannot hold a {type(value).__name__}: {value!r}"
            problems.append(Diagnostic("HF103", message, span, "use numbers, strings, lists and dicts"))
            return Item(None, span, span)


def reference(function: str | Callable[..., Any], beside: str) -> str:
    """How a graph file in the folder of `beside` names a function: by module if Python finds it there, else
    by file. A module beside the script that runs is found by that alone.

    Raises:
        HflowError: HF205 when it is in no file.
    """
    if isinstance(function, str):
        return function
    name, module = getattr(function, "__name__", repr(function)), function.__module__
    try:
        file = inspect.getsourcefile(function)
    except TypeError:  # one of Python's own, or an object that can be called
        file = None
    if not file or not Path(file).is_file():
        message = f"`{name}` is in no file, as of a notebook's cell or the prompt: workers cannot import it"
        help_ = "put it into a file (`%%writefile rewards.py` in a notebook), and import it from there"
        raise HflowError(Diagnostic("HF205", message, help=help_))
    try:
        is_own = "." not in module and _is_beside_script(file)
        if not is_own and find_module(module).samefile(file):
            return f"{module}.{name}"
    except HflowError:  # a script
        pass
    return f"{relative(os.path.relpath(file, Path(beside).parent))}:{name}"


def _is_beside_script(file: str) -> bool:
    script = getattr(sys.modules["__main__"], "__file__", None)
    return bool(script) and Path(script).resolve().parent == Path(file).resolve().parent
