"""How much torch's allocator holds while something runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hflow.runtime.engines.megatron import products
from hflow.runtime.engines.megatron.cpu_kernels import library as library_module
from hflow.runtime.engines.megatron.cpu_kernels.library import SWITCH, library


@contextlib.contextmanager
def torch_operations() -> Iterator[None]:
    """No kernels for CPUs: torch's operations, for which plans have room."""
    with patch.dict(os.environ, {SWITCH: "0"}):
        library.cache_clear()
        try:
            yield
        finally:
            library.cache_clear()


def kernels_for(processor: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> CDLL:
    """Kernels compiled for another x86 processor, which a test has in the place of this one's."""
    monkeypatch.setattr(library_module, "FLAGS", (*library_module.FLAGS, f"-march={processor}"))
    other = library_module.built(folder)
    monkeypatch.setattr(library_module, "library", lambda: other)
    return other


def with_fast_bf16(found: bool) -> contextlib.AbstractContextManager[object]:
    """As on a CPU for which torch has fast products in bf16, as plans of memory assume, or on one without."""
    return patch.object(products, "_has_fast_bf16", lambda: found)


def peak_bytes(action: Callable[[], object]) -> int:
    """The most bytes on the CPU during `action`, beside those it begins with."""
    return int(_held(action).max())


def held_bytes(action: Callable[[], object]) -> int:
    """The bytes on the CPU after `action`, beside those it begins with."""
    return int(_held(action)[-1])


def _held(action: Callable[[], object]) -> torch.Tensor:
    """The bytes after each allocation or release during `action`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    events: list[Any] = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return torch.tensor([e.nbytes() for e in memory]).cumsum(0)
