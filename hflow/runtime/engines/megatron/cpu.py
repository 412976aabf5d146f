"""The one room for running Megatron without CUDA, on machines with GPUs and without.

Megatron-core names CUDA in places that run on every machine. An import hook rewrites those places in
Megatron's own source as it is compiled, to ask `present_device`, to multiply by `products`, and to send by
`gloo_collectives`: on a GPU they do what they did. torch itself is not touched. The compiled code is kept in
a folder of its own, away from the code that Python compiled from the plain source.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from hflow.runtime.engines.megatron import present_device

PACKAGE = "megatron.core"
NAME = "hflow_device"  # under which rewritten modules have `present_device`


@dataclass(frozen=True)
class Rule:
    """Replace every match of `pattern` within a line, because of `reason`."""

    name: str
    pattern: str
    replacement: str
    reason: str


RULES = (
    Rule(
        "current device",
        r"torch\.cuda\.current_device\(\)",
        f"{NAME}.current_device()",
        "parameters, gradient buffers and receive buffers are made on the current CUDA device",
    ),
    Rule(
        "device keyword",
        r"""\bdevice\s*=\s*(["'])cuda\1""",
        f"device={NAME}.current_device()",
        "small counters of the schedules, the optimizer and gradient clipping are made on CUDA",
    ),
    Rule(
        "synchronize",
        r"torch\.cuda\.synchronize\(\)",
        f"{NAME}.synchronize()",
        "pipeline stages wait for the CUDA stream after each exchange",
    ),
    Rule(
        "tensor type",
        r"""(["'])torch\.cuda\.(Float|Half|BFloat16)Tensor\1""",
        rf"{NAME}.tensor_type('\2')",
        "the optimizers and gradient clipping tell dtypes apart by the names of CUDA tensor types",
    ),
    Rule(
        "move to device",
        r"\.cuda\(\)",
        f".to({NAME}.current_device())",
        "tied embeddings on two pipeline stages are moved to CUDA before they are made equal",
    ),
    Rule(
        "compiled functions",
        r"(?m)^enable_jit_fuser\(\)",
        f"(enable_jit_fuser if {NAME}.compiles() else disable_jit_fuser)()",
        "marking functions for torch.compile imports the compiler, a quarter of a worker's start on a CPU",
    ),
    Rule(
        "product",
        r"torch\.matmul\((input|total_input), weight\.t\(\)\)",
        rf"{NAME}.product(\1, weight.t())",
        "linear layers multiply in bf16, which torch does number by number on some CPUs",
    ),
    Rule(
        "product of gradients",
        r"grad_output(\.t\(\))?\.matmul\((weight|total_input)\)",
        rf"{NAME}.product(grad_output\1, \2)",
        "so do their backward passes",
    ),
    Rule(
        "reduce-scatter",
        r"dist_reduce_scatter_func = (torch\.distributed\.reduce_scatter_tensor|reduce_scatter_with\w+)",
        f"dist_reduce_scatter_func = {NAME}.reduce_scatter",
        "ZeRO-1 and sequence parallelism scatter sums, for which gloo moves twice as much as it must",
    ),
    Rule(
        "all-gather",
        r"dist_all_gather_func = torch\.distributed\.all_gather_into_tensor",
        f"dist_all_gather_func = {NAME}.all_gather",
        "they gather what was scattered, which gloo copies twice",
    ),
)


def rewrite(source: str) -> str:
    """`source` with all rules applied; lines keep their numbers."""
    for rule in RULES:
        source = re.sub(rule.pattern, rule.replacement, source)
    return source


def install() -> None:
    """Arrange for Megatron to run without CUDA. Does nothing when called again.

    Raises:
        RuntimeError: Megatron has already been imported as it is.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        raise RuntimeError("import hflow.runtime.engines.megatron before megatron.core")
    sys.meta_path.insert(0, _Finder())
    if torch.cuda.is_available():
        return
    # Neither package can be installed without CUDA, so their absence is no news.
    warnings.filterwarnings("ignore", r"(Transformer Engine and )?Apex (is|are) not installed")
    warnings.filterwarnings("ignore", "The following imports from `dynamic_context.py`", DeprecationWarning)


@cache
def code_folder() -> Path:
    """Where compiled, rewritten code is kept: one folder per user, Megatron version and set of rules."""
    version = importlib.metadata.version("megatron-core")
    digest = hashlib.sha256(repr(RULES).encode()).hexdigest()[:12]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "hflow" / f"megatron-{version}-{digest}"


@contextlib.contextmanager
def _own_code_folder() -> Iterator[None]:
    before, sys.pycache_prefix = sys.pycache_prefix, str(code_folder())
    try:
        yield
    finally:
        sys.pycache_prefix = before


class _Loader(importlib.machinery.SourceFileLoader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        setattr(module, NAME, present_device)
        return module

    def get_code(self, fullname: str) -> CodeType | None:
        with _own_code_folder():
            return super().get_code(fullname)

    def source_to_code(self, data: Any, path: Any, *args: Any, **options: Any) -> CodeType:  # type: ignore[override]
        text = rewrite(bytes(data).decode())
        return super().source_to_code(text.encode(), path, *args, **options)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
