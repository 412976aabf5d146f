"""Products of few rows on CPUs against torch's in float64."""

from __future__ import annotations

import math
import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hflow.runtime.engines.megatron.cpu_kernels import library, linear
from tests.engines.memory import kernels_for

pytestmark = pytest.mark.skipif(not library.compilers(), reason="there is no C++ compiler")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
ROWS = (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 23, 24, 33, 64)  # whole tiles, dots beside them, and parts of both
PROCESSORS = [  # what a compiler calls them, and what of theirs a processor needs
    ("x86-64", "sse2"), ("x86-64-v3", "avx2"), ("x86-64-v4", "avx512vl"), ("cooperlake", "avx512_bf16"),
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that have run."""
    found = list[str]()
    run = library.call

    def call(name: str, *given: object) -> None:
        found.append(name)
        run(name, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(linear, "call", call)
    return found


def close(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert found.dtype == x.dtype and found.shape == expected.shape
    unit = 2**-7 if x.dtype == torch.bfloat16 else 2**-18
    torch.testing.assert_close(found.double(), expected, rtol=unit, atol=unit * math.sqrt(x.shape[-1]))


@DTYPES
@pytest.mark.parametrize(
    ("width", "outputs"), [(32, 8), (48, 16), (80, 24), (96, 40), (64, 56), (256, 1376), (1056, 256)]
)
def test_products_of_few_rows(dtype: torch.dtype, width: int, outputs: int, calls: list[str]) -> None:
    weight, bias = torch.randn(outputs, width).to(dtype), torch.randn(outputs).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, width).to(dtype)
        close(linear.linear(x, weight), x, weight)
        close(linear.linear(x, weight, bias), x, weight, bias)
    assert len(calls) == 2 * len(ROWS)


@DTYPES
def test_rows_of_any_shape_and_strides(dtype: torch.dtype) -> None:
    weight, memory = torch.randn(24, 64).to(dtype), torch.randn(5, 9, 64).to(dtype)
    for x in (memory, memory[:, 4:5], memory[:, 8], memory.transpose(0, 1), memory[0, 0]):
        close(linear.linear(x, weight), x, weight)


def test_what_the_kernel_is_not_for(calls: list[str]) -> None:
    """More rows than are few, parts of lines and of columns, and weights that are not as they were made."""
    weight = torch.randn(16, 64)
    others = [
        (torch.randn(linear.MOST_ROWS + 1, 64), weight),
        (torch.randn(3, 40), torch.randn(16, 40)),
        (torch.randn(3, 64), torch.randn(20, 64)),
        (torch.randn(3, 64), torch.randn(64, 16).T),
        (torch.randn(3, 64).double(), weight.double()),
    ]
    for x, w in others:
        assert torch.equal(linear.linear(x, w), torch.nn.functional.linear(x, w))
    assert not calls
    linear.linear(torch.randn(linear.MOST_ROWS, 64), weight)
    assert calls == ["linear"]


@DTYPES
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    x, weight = torch.randn(37, 512).to(dtype), torch.randn(2048, 512).to(dtype)  # worth further threads
    before, found = torch.get_num_threads(), list[Tensor]()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(linear.linear(x, weight))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@DTYPES
@pytest.mark.parametrize("width", [64, 80])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(dtype: torch.dtype, bad: float, width: int) -> None:
    """Of rows in a tile, and of those beside it; 80 numbers do not fill the tiles of a matrix unit."""
    x, weight = torch.randn(19, width).to(dtype), torch.randn(16, width).to(dtype)
    clean = linear.linear(x, weight).isfinite()
    assert clean.all()
    for row in (5, 17):
        one = x.clone()
        one[row, 7] = bad
        assert linear.linear(one, weight).isfinite().all(1).logical_not().nonzero().flatten().tolist() == [
            row
        ]
    weight[3, 1] = bad
    assert linear.linear(x, weight).isfinite().all(0).logical_not().nonzero().flatten().tolist() == [3]


@pytest.mark.slow
@DTYPES
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of one kind")
@pytest.mark.parametrize(("processor", "needed"), PROCESSORS)
def test_on_processors_with_less(
    processor: str,
    needed: str,
    dtype: torch.dtype,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Vectors of 4, 8 and 16 numbers, and the instruction for bf16 without AMX; this machine may have all."""
    if needed not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {needed}")
    kernels_for(processor, monkeypatch, tmp_path)
    weight = torch.randn(40, 96).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, 96).to(dtype)
        close(linear.linear(x, weight), x, weight)
    assert len(calls) == len(ROWS)
