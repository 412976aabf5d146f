"""The kernels for CPUs against torch's own operations in float64."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from hflow.runtime.engines.megatron import logprobs as logprobs_module
from hflow.runtime.engines.megatron import norm as norm_module
from hflow.runtime.engines.megatron.cpu_kernels import gated, library, logprobs, norm, rotary
from hflow.runtime.engines.megatron.cpu_kernels.newest import attend_newest
from hflow.runtime.engines.megatron.cpu_kernels.place import place
from hflow.runtime.engines.megatron.prefix import Prefix
from tests.engines.memory import torch_operations

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


def prefix_case(
    dtype: torch.dtype, sizes: tuple[int, int, int], lengths: tuple[int, int]
) -> tuple[Tensor, Prefix, tuple[Tensor, Tensor]]:
    """Queries of 9 rows, in no order, of 4 prompts; their padding, of which one has none and one all but
    its last place, holds NaN; and what comes after them, a part of a larger memory."""
    (groups, heads, width), (prompt, own) = sizes, lengths
    layers = [
        tuple(torch.randn(4, groups, prompt + 3, width).to(dtype)[:, :, :prompt] for _ in range(2))
        for _ in range(2)
    ]
    present = torch.arange(prompt) >= torch.tensor([0, 2, prompt // 2, prompt - 1])[:, None]
    for memory in (x for layer in layers for x in layer):
        memory[~present[:, None].expand(-1, groups, -1)] = math.nan
    memory = [torch.randn(9, groups, own + 5, width).to(dtype)[:, :, :own] for _ in range(2)]
    prefix = Prefix.shared(
        [(key, value) for key, value in layers], present, torch.tensor([2, 0, 1, 2, 3, 0, 0, 2, 1])
    )
    return torch.randn(9, groups, heads, width).to(dtype), prefix, (memory[0], memory[1])


def attended(
    query: Tensor,
    prefix: Prefix,
    own: tuple[Tensor, Tensor],
    cap: float | None,
    sinks: Tensor | None,
    window: int | None,
) -> Tensor:
    """In float64, one row after the other, of the second layer."""
    found = torch.empty(query.shape, dtype=torch.float64)
    for row, prompt in enumerate(prefix.of.tolist()):
        there = (
            torch.ones(prefix.places, dtype=torch.bool) if prefix.present is None else prefix.present[prompt]
        )
        key, value = (
            torch.cat([x[prompt][:, there], y[row]], 1).double()[:, -(window or 10_000) :]
            for x, y in zip(prefix.layers[1], own, strict=True)
        )
        scores = query[row].double() @ key.mT / math.sqrt(query.shape[-1])
        scores = scores if cap is None else cap * (scores / cap).tanh()
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(*query.shape[1:3], 1)], -1)
        found[row] = scores.softmax(-1)[..., : key.shape[1]] @ value
    return found


@DTYPES
@pytest.mark.parametrize("sizes", [(1, 1, 16), (2, 3, 20), (2, 2, 64), (1, 7, 96), (2, 4, 128)])
@pytest.mark.parametrize("lengths", [(5, 1), (70, 3), (130, 200)])
def test_attention_after_shared_prompts(
    dtype: torch.dtype, sizes: tuple[int, int, int], lengths: tuple[int, int]
) -> None:
    query, prefix, own = prefix_case(dtype, sizes, lengths)
    close(attend_newest(query, 1, prefix, own), attended(query, prefix, own, None, None, None))
    padded = prefix.layers[1][0][0], prefix.present
    prefix.of, prefix.present = torch.zeros_like(prefix.of), None  # the prompt without padding
    assert padded[0].isfinite().all()
    close(attend_newest(query, 1, prefix, own), attended(query, prefix, own, None, None, None))


@DTYPES
@pytest.mark.parametrize("window", [1, 3, 8, 40, 200])
def test_attention_within_a_window(dtype: torch.dtype, window: int) -> None:
    """That ends in a row's own tokens, in its prompt, or before it."""
    query, prefix, own = prefix_case(dtype, (2, 2, 64), (90, 8))
    close(
        attend_newest(query, 1, prefix, own, window=window), attended(query, prefix, own, None, None, window)
    )


@DTYPES
def test_attention_with_capped_scores_and_sinks(dtype: torch.dtype) -> None:
    query, prefix, own = prefix_case(dtype, (2, 3, 64), (33, 7))
    sinks, far = torch.randn(6).mul(3).to(dtype), 20 * query  # scores beyond the cap
    for asked, cap, sink in ((far, 5.0, None), (query, None, sinks), (far, 5.0, sinks)):
        found = attend_newest(asked, 1, prefix, own, cap, sink)
        rtol, atol = (2**-7, 2**-7) if dtype == torch.bfloat16 else (1e-5, 1e-5)
        expected = attended(asked, prefix, own, cap, sink, None)
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


def test_attention_of_a_row_does_not_depend_on_others_nor_threads() -> None:
    """Rows leave while others go on, and workers have different numbers of cores."""
    query, prefix, own = prefix_case(torch.float32, (2, 2, 64), (70, 90))
    found = attend_newest(query, 1, prefix, own)
    rows = torch.tensor([7, 1, 4])
    prefix.keep(rows)
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        fewer = attend_newest(query[rows], 1, prefix, (own[0][rows], own[1][rows]))
        assert torch.equal(fewer, found[rows])
    torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_key_that_is_not_finite_is_seen_in_its_row(bad: float) -> None:
    query, prefix, own = prefix_case(torch.float32, (2, 2, 64), (9, 4))
    own[0][3, 1, 2, 7], query[3, 1, :, 7] = bad, 1
    finite = attend_newest(query, 1, prefix, own).isfinite().all(-1).all(-1)
    assert finite[[0, 1, 2, 4, 5, 6, 7, 8]].all() and finite[3].tolist() == [True, False]


TEMPERATURE = 0.7


def softmax_case(rows: int, words: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits; columns of chosen words, of which every third is another rank's; gradients of log-prob and
    entropy."""
    logits = (4 * torch.randn(rows, words)).to(dtype)
    return logits, torch.randint(words, (rows,)), torch.arange(rows) % 3 > 0, *torch.randn(2, rows)


@DTYPES
@ROWS
@pytest.mark.parametrize("words", [1, 5, 137, 1024, 2500])
def test_sums_of_softmax(dtype: torch.dtype, rows: int, words: int) -> None:
    logits = (4 * torch.randn(rows, words + 3)).to(dtype)[
        :, 1:-2
    ]  # rows apart, as a transposed product may be
    z = logits.double() / TEMPERATURE
    greatest = z.amax(-1)
    below = z - greatest[:, None]
    for entropy in (True, False):
        top, total, spread = logprobs.sums(logits, TEMPERATURE, entropy)
        expected = below.exp(), (below * below.exp()) * entropy
        assert top.dtype == total.dtype == spread.dtype == torch.float32
        torch.testing.assert_close(top.double(), greatest, rtol=2**-23, atol=0)
        for found, terms in zip((total, spread), expected, strict=True):
            torch.testing.assert_close(found.double(), terms.sum(-1), rtol=5e-6, atol=5e-6)


def test_sums_over_many_words_are_exact() -> None:
    """One after the other in float32 they would be 1e-3 of their sum away, and in vectors of 16 3e-5."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.full((2, 151_936), -0.4375, dtype=dtype)
        logits[:, 7] = 0
        _, total, spread = logprobs.sums(logits, 1.0, True)
        each = math.exp(-0.4375) * 151_935
        expected = torch.tensor([1 + each, -0.4375 * each]).double()
        torch.testing.assert_close(torch.stack([total[0], spread[1]]).double(), expected, rtol=1e-6, atol=0)


@DTYPES
@ROWS
@pytest.mark.parametrize("words", [1, 5, 137, 1024, 2500])
@pytest.mark.parametrize("entropy", [True, False])
def test_gradients_of_softmax(dtype: torch.dtype, rows: int, words: int, entropy: bool) -> None:
    logits, columns, mine, to_log_prob, to_entropy = softmax_case(rows, words, dtype)
    z = logits.double().requires_grad_()
    log_p = (z / TEMPERATURE).log_softmax(-1)
    spread = -(log_p.exp() * log_p).sum(-1)
    # of a word that another rank has this one has no logit: its log-prob is - log sum exp z
    total = (z / TEMPERATURE).logsumexp(-1)
    chosen = log_p.gather(1, columns[:, None])[:, 0].where(mine, -total)
    (chosen @ to_log_prob.double() + (spread @ to_entropy.double() if entropy else 0)).backward()
    assert z.grad is not None
    upstream = to_entropy if entropy else None
    given = total.detach().float(), to_log_prob, columns, mine, upstream, spread.detach().float(), TEMPERATURE
    before = logits.clone()
    found = logprobs.to_logits(logits, *given)
    assert torch.equal(logits, before) and found.dtype == dtype
    # z of up to 25 is rounded by 1e-6, and p with it; what it multiplies is up to 10
    rtol, atol = (2e-5, 1e-5) if dtype == torch.float32 else (2**-8, 2e-5)
    torch.testing.assert_close(found.double(), z.grad, rtol=rtol, atol=atol)
    again = logprobs.to_logits(logits, *given, in_place=True)
    assert again.data_ptr() == logits.data_ptr() and torch.equal(again, found)


def test_exponentials_are_exact_to_two_units() -> None:
    """Of all that float32 can tell: p of log p, from 0 to where it is nothing."""
    log_p = -torch.cat([torch.linspace(0, 88, 100_001), torch.logspace(-8, 6, 10_001), torch.tensor([0.0])])
    nothing = torch.zeros(1)
    given = nothing, -nothing - 1, nothing.long(), nothing.bool(), None, nothing, 1.0
    p = logprobs.to_logits(log_p[None], *given)[0]
    expected = log_p.double().exp()
    unit = torch.finfo(torch.float32).tiny
    torch.testing.assert_close(p.double(), expected, rtol=2 * 2**-23, atol=2 * unit)
    assert p[log_p == 0].eq(1).all() and p[log_p < -88].eq(0).all()


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@DTYPES
def test_logits_that_are_not_finite(dtype: torch.dtype, bad: float, entropy: bool) -> None:
    """As in torch's operations: -inf is a word of probability 0, whose part of the entropy is 0 times -inf;
    all else makes its row NaN, and none but its row. 3e38 is inf by the temperature."""
    logits, columns, mine, a, b = softmax_case(5, 70, dtype)
    mine[:], columns[:] = True, torch.arange(5)
    logits[1, 9], logits[2, 2], logits[3] = bad, bad, bad
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def passes() -> list[Tensor]:
        given = logits.clone().requires_grad_()
        found = logprobs_module.log_probs(given, columns, group, TEMPERATURE, entropy)
        (found[0] @ a + (found[1] @ b if entropy else 0)).backward()
        assert given.grad is not None
        return [*(x.detach() for x in found), given.grad]

    assert logprobs_module.kernels(logits) is logprobs
    by_kernels = passes()
    with torch_operations():
        expected = passes()
    for found, theirs in zip(by_kernels, expected, strict=True):
        assert torch.equal(found.isfinite(), theirs.isfinite()) and torch.equal(found.isnan(), theirs.isnan())
        close(found.nan_to_num(), theirs.to(found.dtype).nan_to_num())
    assert by_kernels[0].isfinite().tolist() == [True, bad == -math.inf, False, False, True]


def test_words_of_another_rank_alone_have_probability() -> None:
    """Of a part of the vocabulary with nothing but -inf all sums are 0, and its gradient too."""
    logits = torch.full((2, 40), -math.inf)
    top, total, _ = logprobs.sums(logits, 1.0, False)
    assert top.isneginf().all() and not total.any()
    ones = torch.ones(2)
    given = ones, ones, torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool), None, ones, 1.0
    assert not logprobs.to_logits(logits, *given).any()


@DTYPES
@pytest.mark.parametrize("entropy", [True, False])
def test_softmax_does_not_depend_on_the_number_of_threads(dtype: torch.dtype, entropy: bool) -> None:
    logits, columns, mine, to_log_prob, to_entropy = softmax_case(301, 1237, dtype)
    spread = to_entropy if entropy else None
    before, found = torch.get_num_threads(), list[tuple[Tensor, ...]]()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        top, total, weighted = logprobs.sums(logits, TEMPERATURE, entropy)
        given = top + total.log(), to_log_prob, columns, mine, spread, weighted, TEMPERATURE
        found.append((top, total, weighted, logprobs.to_logits(logits, *given)))
    torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(others, found[0], strict=True))


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


def test_a_change_of_any_source_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "sources"
    shutil.copytree(library.SOURCE.parent, changed)
    monkeypatch.setattr(library, "SOURCE", changed / library.SOURCE.name)
    compiler = library.compilers()[0]
    keys = {library._key(compiler)}
    for path in library.sources():
        path.write_text(path.read_text() + "\n")
        keys.add(library._key(compiler))
    assert len(keys) == 1 + len(list(changed.glob("*.h"))) + 1


@pytest.mark.slow
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


@pytest.mark.slow
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
