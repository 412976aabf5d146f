"""act(gate) * up of gate and up side by side, and its gradient, with one pass over the memory each."""

# Triton may not be installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hflow.plan.model_shape import Activation
from hflow.runtime.engines.megatron.kernels import jit

BLOCK = 1024  # columns of one program


def product(x: Tensor, activation: Activation) -> Tensor:
    """``[..., ffn]`` of ``[..., 2 * ffn]``."""
    x = x.contiguous()
    ffn = x.shape[-1] // 2
    found = x.new_empty(*x.shape[:-1], ffn)
    if found.numel():
        _product[_grid(found)](x, found, ffn, activation == "gelu_tanh", BLOCK)
    return found


def gradient(to_product: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """That of `x`, ``[..., 2 * ffn]``, of that of the product, ``[..., ffn]``."""
    to_product, x = to_product.contiguous(), x.contiguous()
    found = torch.empty_like(x)
    ffn = to_product.shape[-1]
    if found.numel():
        _gradient[_grid(to_product)](to_product, x, found, ffn, activation == "gelu_tanh", BLOCK)
    return found


def _grid(product: Tensor) -> tuple[int, int]:
    """A program for each row and block of columns."""
    ffn = product.shape[-1]
    return product.numel() // ffn, triton.cdiv(ffn, BLOCK)


@jit
def _product(x, out, ffn, is_gelu: tl.constexpr, block: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    gate = tl.load(x + row * 2 * ffn + columns, mask=columns < ffn).to(tl.float32)
    up = tl.load(x + row * 2 * ffn + ffn + columns, mask=columns < ffn).to(tl.float32)
    active, _ = _activation(gate, is_gelu)
    tl.store(out + row * ffn + columns, active * up, mask=columns < ffn)


@jit
def _gradient(to_product, x, out, ffn, is_gelu: tl.constexpr, block: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    gate = tl.load(x + row * 2 * ffn + columns, mask=columns < ffn).to(tl.float32)
    up = tl.load(x + row * 2 * ffn + ffn + columns, mask=columns < ffn).to(tl.float32)
    upstream = tl.load(to_product + row * ffn + columns, mask=columns < ffn).to(tl.float32)
    active, slope = _activation(gate, is_gelu)
    tl.store(out + row * 2 * ffn + columns, upstream * up * slope, mask=columns < ffn)
    tl.store(out + row * 2 * ffn + ffn + columns, upstream * active, mask=columns < ffn)


@jit
def _activation(x, is_gelu: tl.constexpr):
    """silu, or gelu with tanh(z) = 2 sigmoid(2 z) - 1 in the place of the normal distribution; its slope."""
    if is_gelu:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        active = 0.5 * x * (1 + tanh)
        slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * 0.7978845608028654 * (1 + 0.134145 * x * x)
    else:
        share = tl.sigmoid(x)
        active = x * share
        slope = share + active * (1 - share)
    return active, slope
