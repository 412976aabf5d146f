"""The kernels for CPUs against torch's own operations in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from hflow.runtime.engines.megatron import norm as norm_module
from hflow.runtime.engines.megatron.cpu_kernels import gated, library, norm, rotary
from hflow.runtime.engines.megatron.cpu_kernels.place import place

pytestmark = pytest.mark.skipif(not library.compilers(), reason="there is no C++ compiler")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
ROWS = pytest.mark.parametrize("rows", [0, 1, 7, 700])  # the last are worth two threads


def close(found: Tensor, expected: Tensor) -> None:
    """As near as one rounding of the result, and of sums in float32, allows."""
    rtol, atol = (2**-7, 2**-7) if found.dtype == torch.bfloat16 else (2e-6, 2e-6)
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=atol)


def of_float64(function: Any, upstream: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What a function gives for the same numbers, and the gradients of its inputs."""
    wide = [x.double().requires_grad_() for x in inputs]
    found = function(*wide)
    return found.detach(), *torch.autograd.grad(found, wide, upstream.double())


@DTYPES
@ROWS
@pytest.mark.parametrize("offset", [0, 1])
def test_norms(dtype: torch.dtype, rows: int, offset: int) -> None:
    width = 264
    x, upstream = (torch.randn(rows, width).mul(3).to(dtype) for _ in range(2))
    weight = torch.randn(width).to(dtype)
    expected = of_float64(lambda x, w: rms_norm(x, (width,), offset + w, 1e-5), upstream, x, weight)
    close(norm.normed(x, weight, 1e-5, offset), expected[0])
    of_x, of_weight = norm.gradients(upstream, x, weight, 1e-5, offset)
    close(of_x, expected[1])
    scale = math.sqrt(max(rows, 1))  # of the sum over rows
    assert of_weight.dtype == torch.float32
    torch.testing.assert_close(of_weight.double() / scale, expected[2] / scale, rtol=1e-5, atol=1e-5)


@DTYPES
@ROWS
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gates(dtype: torch.dtype, rows: int, name: Any) -> None:
    ffn = 137
    x, upstream = torch.randn(rows, 2 * ffn).mul(4).to(dtype), torch.randn(rows, ffn).to(dtype)
    act = silu if name == "silu" else lambda z: gelu(z, approximate="tanh")
    product, gradient = of_float64(lambda x: act(x[:, :ffn]) * x[:, ffn:], upstream, x)
    close(gated.product(x, name), product)
    close(gated.gradient(upstream, x, name), gradient)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gates_far_from_zero(name: Any) -> None:
    least = -3e38 if name == "silu" else -1e6  # whose cube is finite, too
    gate = torch.tensor([least, -200.0, -90.0, -0.0, 90.0, 200.0])
    x = torch.cat([gate, torch.ones(6)])[None]
    expected = [0, 0, 0, 0, 90, 200]
    torch.testing.assert_close(gated.product(x, name)[0], torch.tensor(expected).float())
    slopes = gated.gradient(torch.ones(1, 6), x, name)[0, :6]
    torch.testing.assert_close(slopes, torch.tensor([0, 0, 0, 0.5, 1, 1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@DTYPES
def test_what_is_not_finite_stays_so_in_its_row(dtype: torch.dtype, bad: float) -> None:
    """Updates with such gradients are found by looking for it."""
    x = torch.randn(3, 64).to(dtype)
    x[1, 5] = bad
    for found in (norm.normed(x, torch.ones(64, dtype=dtype), 1e-6, 0), gated.product(x, "silu")):
        assert found.isfinite().all(1).tolist() == [True, False, True]
    assert not norm.gradients(torch.ones_like(x), x, torch.ones(64, dtype=dtype), 1e-6, 0)[1].isfinite().all()


@DTYPES
@ROWS
@pytest.mark.parametrize(("heads", "width", "half"), [(3, 16, 8), (40, 64, 32), (5, 24, 8)])
def test_rotary_positions(dtype: torch.dtype, rows: int, heads: int, width: int, half: int) -> None:
    """By complex numbers: dim i and dim i + half are one of them."""
    x = torch.randn(rows, heads + 2, width).to(dtype)[:, 1:-1]  # a part of each token, as queries are
    angles = torch.randn(rows, half)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turns = torch.complex(cos.double(), sin.double())[:, None]
    for sign, turn in ((1, turns), (-1, turns.conj())):
        wide = x.double()
        by = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * turn
        close(rotary.turned(x, cos, sin, sign), torch.cat([by.real, by.imag, wide[..., 2 * half :]], -1))


@DTYPES
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_newest_token_goes_to_its_place(dtype: torch.dtype, factor: float) -> None:
    rows, groups, heads, width, half = 5, 2, 3, 16, 6
    qkv = torch.randn(rows, groups, heads + 2, width).to(dtype)
    cos, sin = torch.randn(2, half).to(dtype)
    keys, values = (torch.zeros(rows, groups, 9, width, dtype=dtype) for _ in range(2))
    cache = keys[:, :, 4], values[:, :, 4]
    queries = place(qkv[:, :, :-1], qkv[:, :, -1], (cos, sin), cache, factor)
    tables = cos.expand(rows, -1), sin.expand(rows, -1)
    turned = rotary.turned(qkv[:, :, :-1].flatten(1, 2), *tables, 1).view(rows, groups, heads + 1, width)
    close(queries, turned[:, :, :-1] * factor)
    assert torch.equal(keys[:, :, 4], turned[:, :, -1]) and torch.equal(values[:, :, 4], qkv[:, :, -1])
    assert not keys[:, :, [3, 5]].any() and not values[:, :, [3, 5]].any()


def test_a_gradient_does_not_depend_on_the_number_of_threads() -> None:
    """Ranks of tp that have the same norm need not have as many cores, and do not sum its gradient."""
    x, upstream, weight = torch.randn(3000, 256), torch.randn(3000, 256), torch.randn(256)
    before, found = torch.get_num_threads(), list[tuple[Tensor, Tensor]]()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(norm.gradients(upstream, x, weight, 1e-6, 0))
    torch.set_num_threads(before)
    for of_x, of_weight in found[1:]:
        assert torch.equal(of_x, found[0][0]) and torch.equal(of_weight, found[0][1])


@pytest.fixture
def afresh() -> Any:
    """What a process decides once is decided again, within the test and after it."""
    library.library.cache_clear()
    yield
    library.library.cache_clear()


@pytest.mark.usefixtures("afresh")
def test_without_a_compiler_torch_does_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    by_kernel = norm_module._normed(x, weight, 1e-6, 0)
    library.library.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(UserWarning, match="there is no C\\+\\+ compiler"):
        assert not library.runs_on(x)
    torch.testing.assert_close(norm_module._normed(x, weight, 1e-6, 0), by_kernel)


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-no-such-flag"))
    with pytest.raises(library.NotBuiltError, match="no-such-flag"):
        library.built(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_next_compiler_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false --with arguments")
    assert library.compilers()[0][1:] == ["--with", "arguments"]
    assert library.built(tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(library.NotBuiltError, match="file"):
        library.built(tmp_path / "file" / "kernels")


@pytest.mark.usefixtures("afresh")
def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    assert library.library() is None


def test_processes_may_compile_at_the_same_time(tmp_path: Path) -> None:
    program = "from hflow.runtime.engines.megatron.cpu_kernels.library import library\nassert library()"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    (only,) = (tmp_path / "hflow" / "cpu-kernels").iterdir()
    assert only.suffix == ".so"


def test_other_types_are_left_to_torch() -> None:
    assert library.runs_on(torch.zeros(1)) and library.runs_on(torch.zeros(1, dtype=torch.bfloat16))
    assert not library.runs_on(torch.zeros(1, dtype=torch.float64))
    assert not library.runs_on(torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16))
