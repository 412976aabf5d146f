"""From the functions that a graph names to Python: here, in the runtime, they are imported at last."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hflow.diagnostics import Diagnostic, HflowError, shown_path
from hflow.importing import importing


@cache
def load_function(reference: str) -> Callable[..., Any]:
    """The function that ``package.module.function`` or ``./file.py:function`` names.

    A relative file is looked for where hflow runs. Each file is executed once.

    Raises:
        HflowError: HF205 when the module cannot be imported or has no such function.
    """
    where, _, name = reference.rpartition(":") if ":" in reference else reference.rpartition(".")
    try:
        is_file = where.endswith(".py")
        module = _file_module(Path(where).resolve()) if is_file else _module(where)
        function = getattr(module, name)
    except HflowError:
        raise
    except Exception as error:  # user code: anything may come out of importing it
        problem = f"function `{reference}` cannot be imported: {type(error).__name__}: {error}"
        raise HflowError(Diagnostic("HF205", problem)) from error
    if not callable(function):
        raise HflowError(Diagnostic("HF205", f"`{reference}` is no function"))
    return function


def describe_failure(function: Callable[..., Any], error: BaseException) -> str:
    """What a function raised, and the innermost line of its file that led there:
    ``rewards.py:6: ZeroDivisionError: division by zero``."""
    what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else _raised(error)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:  # a callable object
        return what
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{shown_path(code.co_filename)}:{lines[-1]}: {what}" if lines else what


def _raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _module(name: str) -> ModuleType:
    with importing(Path(name)):
        return importlib.import_module(name)


@cache
def _file_module(path: Path) -> ModuleType:
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    if str(path.parent) not in sys.path:  # it may import files beside it, like a script
        sys.path.append(str(path.parent))
    with importing(path):
        spec.loader.exec_module(module)
    return module
