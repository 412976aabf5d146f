"""A layer's attention and its MLP for few tokens, by one call each.

With few rows, calls of operations, and tensors between them, are a tenth of a token's time or more.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hflow.plan.model_shape import Activation
from hflow.runtime.engines.megatron.cpu_kernels.library import call
from hflow.runtime.engines.megatron.cpu_kernels.linear import has_linear, room
from hflow.runtime.engines.megatron.cpu_kernels.newest import KeysAndValues, sizes, within
from hflow.runtime.engines.megatron.prefix import Prefix


@dataclass(frozen=True)
class NormWeight:
    """Of a root-mean-square norm that multiplies by an offset + this."""

    weight: Tensor
    eps: float
    offset: int


@dataclass(frozen=True)
class AttentionBlock:
    """A norm, attention of one token of each row, and its projections, on the heads of one rank.

    Attributes:
        qkv: ``[groups * (heads + 2) * d, hidden]``: of each group its queries, a key and a value.
        head_norms: the weights of each query's and each key's norm, if they are normed.
        out: ``[hidden, groups * heads * d]``.
        factor: of queries. cap, sinks, window: as of `attend_newest`.
    """

    norm: NormWeight
    qkv: Tensor
    bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    out: Tensor
    groups: int
    heads: int
    factor: float = 1.0
    cap: float | None = None
    sinks: Tensor | None = None
    window: int | None = None

    def has(self, x: Tensor) -> bool:
        """Whether there are kernels for ``[rows, 1, hidden]``."""
        return has_linear(x, self.qkv) and has_linear(x, self.out)

    def __call__(
        self, x: Tensor, angles: tuple[Tensor, Tensor], layer: int, prefix: Prefix, own: KeysAndValues
    ) -> Tensor:
        """What is added to `x`, but for what other ranks have and a bias of `out`.

        Args:
            angles: cosines and sines, ``[turning / 2]``, of the place.
            layer: whose keys and values of the `prefix` are meant.
            own: the tokens of each row that come after its prefix, of which the newest are written.
        """
        (cos, sin), (rows, width) = angles, (len(x), own[0].shape[3])
        before, own, present = within(self.window, layer, prefix, own)
        queries = self.groups * self.heads * width
        between = rows * (x.shape[-1] + len(self.qkv) + 2 * queries)
        x, found = x.contiguous(), x.new_empty(x.shape)
        space = x.new_empty(between + room(rows, self.qkv, self.out))
        query_norm, key_norm = self.head_norms or (None, None)
        call(
            "attention_block", x, x, self.norm.weight, self.qkv, self.bias, query_norm, key_norm, self.out,
            cos, sin, *before, present, prefix.of, prefix.order, *own, self.sinks, found, space,
            rows, x.shape[-1], self.groups, self.heads, width, len(cos), *sizes(before[0]), *sizes(own[0]),
            self.norm.eps, self.norm.offset, self.factor, self.cap or 0.0,
        )  # fmt: skip
        return found


@dataclass(frozen=True)
class MlpBlock:
    """A norm and a gated MLP, of few tokens of any rows.

    `up`: ``[2 * ffn, hidden]``, of the gate and what it multiplies; `down`: ``[hidden, ffn]``.
    """

    norm: NormWeight
    up: Tensor
    down: Tensor
    activation: Activation

    def has(self, x: Tensor) -> bool:
        """Whether there are kernels for ``[..., hidden]``."""
        return has_linear(x, self.up) and has_linear(x, self.down)

    def __call__(self, x: Tensor) -> Tensor:
        """What is added to `x`, but for what other ranks have."""
        x, (hidden, ffn) = x.contiguous(), self.down.shape
        rows = x.numel() // hidden
        found = x.new_empty(x.shape)
        space = x.new_empty(rows * (hidden + 3 * ffn) + room(rows, self.up, self.down))
        gelu = self.activation == "gelu_tanh"
        call(
            "mlp_block", x, gelu, x, self.norm.weight, self.up, self.down, found, space, rows, hidden, ffn,
            self.norm.eps, self.norm.offset,
        )  # fmt: skip
        return found
