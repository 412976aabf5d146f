"""Typed functions that a graph file names, read from their source. Nothing is imported or run.

A reference is ``package.module.function``, looked up on the Python path, or ``./file.py:function``,
relative to the graph file. The function carries a signature literal, ``@op("...")``, and its options are its
keyword-only parameters.
"""

from __future__ import annotations

import ast
import os
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hflow.bounded_read import UnreadableError, is_broken_text, read_bytes
from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.graph.infer.signature import Signature, parse_signature
from hflow.graph.options import REQUIRED, Kind, Option, brief

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_IN_FILE = re.compile(r"(?P<file>(\.{1,2}/|/).+\.py):(?P<name>[^\W\d]\w*)")
_KINDS: dict[str, Kind] = {"int": "int", "float": "float", "bool": "bool", "str": "str"}
MAX_SOURCE_BYTES = 2**20  # of a file of functions

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
_OPS = Path(__file__).parents[2] / "ops"


@dataclass(frozen=True)
class FunctionSource:
    """`reference` is normalised: a file is relative to where hflow runs, not to the graph file."""

    reference: str
    signature: Signature
    options: tuple[Option, ...]
    whole_batch: bool = False
    min_group: int = 1
    needs: Mapping[str, str] = field(default_factory=dict[str, str])


def read_function(reference: str, folder: Path) -> FunctionSource:
    """Find and read the function that `reference` names; `folder` is that of the graph file.

    Raises:
        HflowError: HF205 when the module, the function or its `@op` is not there, HF206 when its
            signature or its parameters cannot be used. Without a place.
    """
    if match := _IN_FILE.fullmatch(reference):
        file, name = Path(os.path.normpath(folder / match["file"])), match["name"]
        shown = file if file.is_absolute() else f"./{file.as_posix()}"
        reference = f"{shown}:{name}"
    elif _DOTTED.fullmatch(reference):
        module, _, name = reference.rpartition(".")
        file = find_module(module)
    else:
        help_ = _ours(reference) or "write `package.module.function` or `./file.py:function`"
        raise _error("HF205", f"`{reference}` does not name a function", help_)
    function, decorator = _find(file, name)
    signature = _signature(_text(decorator, name), f"{file}:{function.lineno}")
    _check_parameters(function, signature, name)
    said = _keywords(decorator, name)
    if any(p.type.scalar for p in signature.outputs) and not said["whole_batch"]:
        help_ = 'write `@op("...", whole_batch=True)`: only then does it see all rows'
        raise _error("HF206", f"`{name}` makes a scalar of a part of the batch", help_)
    return FunctionSource(reference, signature, tuple(_options(function)), **said)


@cache
def shipped_functions() -> tuple[FunctionSource, ...]:
    """Those of `hflow.ops`, by name."""
    found = list[FunctionSource]()
    for file in sorted(_OPS.glob("*.py")):
        tree = ast.parse(file.read_bytes(), filename=str(file))
        names = [n.name for n in tree.body if isinstance(n, AnyFunction) and _decorator(n)]
        found += [read_function(f"hflow.ops.{file.stem}.{name}", Path()) for name in sorted(names)]
    return tuple(found)


def source_file(reference: str) -> Path:
    """The file that holds a function of a checked graph (`FunctionSource.reference`).

    Raises:
        HflowError: HF205 when its module is not found.
    """
    if match := _IN_FILE.fullmatch(reference):
        return Path(match["file"])
    return find_module(reference.rpartition(".")[0])


def _ours(name: str) -> str:
    """Help where hflow itself has a function of that name."""
    for file in sorted(_OPS.glob("*.py")):
        if name and f"\ndef {name}(" in file.read_text():
            return f"did you mean `hflow.ops.{file.stem}.{name}`?"
    return ""


def find_module(dotted: str) -> Path:
    """The source file of a module, found without importing its parents.

    Raises:
        HflowError: HF205.
    """
    places: list[str] | None = None
    origin: str | None = None
    done = ""
    for part in dotted.split("."):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            known = [m.name for m in pkgutil.iter_modules(places)] if places else []
            inside = f" in `{done}`" if done else " on the Python path"
            help_ = did_you_mean(part, known, "modules") if known else "`./file.py:function` names a file"
            raise _error("HF205", f"no module `{part}`{inside}", help_)
        done = f"{done}.{part}".strip(".")
        places = list(spec.submodule_search_locations or ())
        origin = spec.origin
    if origin is None or not origin.endswith(".py"):
        raise _error("HF205", f"module `{dotted}` has no Python source")
    return Path(origin)


def _find(file: Path, name: str) -> tuple[AnyFunction, ast.Call]:
    """The function's definition and its `@op`."""
    try:
        tree = ast.parse(read_bytes(file, MAX_SOURCE_BYTES), filename=str(file))
    except UnreadableError as error:
        raise _error("HF205", f"cannot read `{file}`: {error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _error("HF205", f"cannot read `{file}`: {error}") from None
    functions = {n.name: n for n in tree.body if isinstance(n, AnyFunction)}
    typed = {n: found for n, f in functions.items() if (found := _decorator(f)) is not None}
    if name not in functions:
        help_ = did_you_mean(name, typed, "its functions with `@op`")
        raise _error("HF205", f"`{file}` has no function `{name}`", help_)
    if name not in typed:
        help_ = 'put `@op("input: type -> output: type")` above it'
        raise _error("HF205", f"function `{name}` in `{file}` has no signature", help_)
    return functions[name], typed[name]


def _decorator(function: AnyFunction) -> ast.Call | None:
    """The call of `op` with a signature above a function."""
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call) or len(decorator.args) != 1:
            continue
        if _last_name(decorator.func) == "op":
            return decorator
    return None


_KEYWORDS: dict[str, tuple[Any, str]] = {
    "whole_batch": (False, "`True` or `False`"),
    "min_group": (1, "an integer"),
    "needs": ({}, "a mapping of options to inputs"),
}


def _keywords(decorator: ast.Call, name: str) -> dict[str, Any]:
    """What `@op` says beside the signature, defaults filled in."""
    said = {keyword: default for keyword, (default, _) in _KEYWORDS.items()}
    for keyword in decorator.keywords:
        if keyword.arg not in _KEYWORDS:
            help_ = did_you_mean(str(keyword.arg), _KEYWORDS, "keywords")
            raise _error("HF206", f"`@op` of `{name}` has no keyword `{keyword.arg}`", help_)
        default, kind = _KEYWORDS[keyword.arg]
        try:
            said[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            said[keyword.arg] = None
        if type(said[keyword.arg]) is not type(default):
            raise _error("HF206", f"`{keyword.arg}` of `{name}` is not {kind}, written out")
    return said


def _text(decorator: ast.Call, name: str) -> str:
    """The signature as `@op` says it."""
    argument = decorator.args[0]
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    help_ = 'write the text itself, `@op("...")`: hflow reads the source and does not run it'
    raise _error("HF206", f"the signature of `{name}` must be a string literal", help_)


def _signature(text: str, place: str) -> Signature:
    try:
        return parse_signature(text)
    except ValueError as error:
        raise _error("HF206", f"signature at {place}: {error}") from None


def _check_parameters(function: AnyFunction, signature: Signature, name: str) -> None:
    """Positional parameters are the signature's inputs; the optional ones default to None."""
    arguments = function.args
    if isinstance(function, ast.AsyncFunctionDef) or arguments.vararg or arguments.kwarg:
        raise _error("HF206", f"`{name}` must be a plain function without `*args` and `**kwargs`")
    positional = [*arguments.posonlyargs, *arguments.args]
    have, want = [a.arg for a in positional], [p.name for p in signature.inputs]
    if have != want:
        message = f"parameters of `{name}` are ({', '.join(have)}), its signature says ({', '.join(want)})"
        raise _error("HF206", message)
    with_default = dict(zip(reversed(have), reversed(arguments.defaults)))
    for port in signature.inputs:
        default = with_default.get(port.name)
        is_none = isinstance(default, ast.Constant) and default.value is None
        if port.optional != is_none or (default is not None and not is_none):
            message = f"`{port.name}` of `{name}`: optional inputs, and only those, default to None"
            raise _error("HF206", message)


def _options(function: AnyFunction) -> Sequence[Option]:
    pairs = zip(function.args.kwonlyargs, function.args.kw_defaults)
    return [_option(function.name, argument, default) for argument, default in pairs]


def _option(function: str, argument: ast.arg, default: ast.expr | None) -> Option:
    value = REQUIRED
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            message = f"default of `{argument.arg}` of `{function}` is no literal"
            raise _error("HF206", message) from None
    if isinstance(value, str) and is_broken_text(value):
        raise _error(
            "HF206", f"default of `{argument.arg}` of `{function}` has a lone surrogate, half a character"
        )
    option = _annotated(argument, value)
    if option is None:
        message = f"parameter `{argument.arg}` of `{function}` cannot be an option"
        help_ = (
            "annotate it as int, float, bool, str, Literal[...], Annotated[float, Ge(0)], "
            "or one of these with `| None`"
        )
        raise _error("HF206", message, help_)
    if value is not REQUIRED and not option.accepts(value):
        message = f"default of `{argument.arg}` of `{function}` must be {option.expectation}"
        help_ = "annotate it with `| None`, too" if value is None else ""
        raise _error("HF206", f"{message}, got {brief(value)}", help_)
    return option


def _annotated(argument: ast.arg, value: Any) -> Option | None:
    annotation, nullable = argument.annotation, False
    if annotation is None and value is not REQUIRED and type(value).__name__ in _KINDS:
        return Option(argument.arg, _KINDS[type(value).__name__], value)
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        nullable = isinstance(annotation.right, ast.Constant) and annotation.right.value is None
        annotation = annotation.left if nullable else None
    if bounded := _bounded(annotation):
        kind, bounds = bounded
        return Option(argument.arg, kind, value, nullable=nullable, **bounds)
    if isinstance(annotation, ast.Name) and annotation.id in _KINDS:
        return Option(argument.arg, _KINDS[annotation.id], value, nullable=nullable)
    choices = _choices(annotation)
    return Option(argument.arg, "str", value, choices=choices, nullable=nullable) if choices else None


_BOUNDS = {"Ge": "least", "Gt": "above", "Lt": "below", "Le": "most"}  # of annotated_types: fields of Option


def _bounded(annotation: ast.expr | None) -> tuple[Kind, dict[str, Any]] | None:
    """Kind and bounds of ``Annotated[float, Ge(0), Lt(1)]``, in any order of the bounds; else None."""
    elements = _subscript(annotation, "Annotated")
    if not elements or not isinstance(elements[0], ast.Name) or elements[0].id not in ("int", "float"):
        return None
    bounds = dict[str, Any]()
    for bound in elements[1:]:
        if not isinstance(bound, ast.Call) or len(bound.args) != 1 or _last_name(bound.func) not in _BOUNDS:
            return None
        try:
            limit = ast.literal_eval(bound.args[0])
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
        if type(limit) not in (int, float):
            return None
        bounds[_BOUNDS[_last_name(bound.func)]] = limit
    return _KINDS[elements[0].id], bounds


def _choices(annotation: ast.expr | None) -> tuple[Any, ...]:
    """The values of ``Literal[...]``, else nothing."""
    elements = _subscript(annotation, "Literal")
    if not all(isinstance(e, ast.Constant) for e in elements):
        return ()
    return tuple(e.value for e in elements if isinstance(e, ast.Constant))


def _subscript(annotation: ast.expr | None, name: str) -> Sequence[ast.expr]:
    """What stands between the brackets of ``name[...]``, also of ``typing.name[...]``; else nothing."""
    if not isinstance(annotation, ast.Subscript) or _last_name(annotation.value) != name:
        return ()
    inner = annotation.slice
    return inner.elts if isinstance(inner, ast.Tuple) else [inner]


def _last_name(expression: ast.expr) -> str:
    """``name`` of ``name`` and of ``module.name``."""
    return getattr(expression, "id", None) or getattr(expression, "attr", "")


def _error(code: str, message: str, help: str = "") -> HflowError:
    return HflowError(Diagnostic(code, message, help=help))
