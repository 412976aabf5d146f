"""What `hflow calibrate` measures: matrix products, memory, a small model, the link between two workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hflow import units
from hflow.graph.ir import WeightDType
from hflow.plan.flops import forward_flops, matmul_parameters
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.runtime.ends import EndRule
from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron.build import build_model
from hflow.runtime.engines.megatron.generate import Sampling, generate
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.pack import Pack
from hflow.runtime.engines.megatron.schedule import forward
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.rows import from_lists

if TYPE_CHECKING:  # at run time hflow.runtime.engines.megatron must come first
    from megatron.core.models.gpt import GPTModel

RUNS, WARM_UP = 25, 2
MANY_RUNS = 99  # of what takes milliseconds, so that one interruption is not seen
LAYERS, VOCABULARY = 4, 128
TOGETHER = 64  # rows that are decoded at once
NARROW = 64  # hidden size of a model that takes least times


@dataclass(frozen=True)
class Sizes:
    """Of what is measured: enough work that starting it costs nothing, little enough to be quick.

    `hidden`: of a model that reads `rows` sequences of `length` tokens. `decoded`: tokens, one after the
    other: on CUDA so many that capturing a graph for them takes little beside them.
    """

    matrix: int
    copy_bytes: int
    all_reduce_bytes: int
    hidden: int
    rows: int
    length: int
    decoded: int


SIZES: Mapping[str, Sizes] = {
    "cpu": Sizes(1024, 2**28, 2**24, hidden=256, rows=16, length=64, decoded=16),
    "cuda": Sizes(8192, 2**30, 2**28, hidden=4096, rows=4, length=2048, decoded=200),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of a device's peak in a cluster file


@dataclass(frozen=True)
class Setting:
    """`ranks` processes take part, of which the first `workers` stand for the workers of a run."""

    platform: Literal["cpu", "cuda"]
    workers: int
    ranks: int
    threads: int

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.platform]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.platform]


@dataclass(frozen=True)
class Seat:
    """One process: `groups` of it alone, `pair` of the first two, between which the link is measured, and
    `split`: theirs for a model that is split over both."""

    rank: int
    setting: Setting
    device: torch.device
    groups: Groups
    pair: dist.ProcessGroup | None
    split: Groups | None

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.setting.dtype, device=self.device)

    def pack(self, rows: int, length: int) -> Pack:
        """``rows * length`` tokens, all of which predict one."""
        tokens = torch.randint(VOCABULARY, (rows, length + 1), device=self.device)
        ones = tokens.new_ones(rows)
        return Pack.of(Sequences(tokens, ones, length * ones))

    def model(self, hidden: int, split: Groups | None = None, dtype: WeightDType | None = None) -> GPTModel:
        """The engine's model, or this rank's half of it, with random weights."""
        dtype = dtype or ("bf16" if self.setting.platform == "cuda" else "f32")
        mesh = Mesh.of((0, 1), tp=2) if split else Mesh.of((self.rank,))
        model = build_model(_shape(hidden), mesh, dtype, split or self.groups, self.device)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        return model

    def median_s(self, operation: Callable[[], object], runs: int = RUNS) -> float:
        """Seconds that `operation` takes, the median of several runs."""
        return median([self._seconds(operation) for _ in range(WARM_UP + runs)][WARM_UP:])

    def together_s(self, operation: Callable[[], object]) -> float:
        """Seconds until all workers have done `operation`, which they begin together: they wait for the
        slowest in every update, too. The median of several runs."""
        found: list[float] = []
        for _ in range(WARM_UP + RUNS):
            self._slowest(0.0)  # all are here
            found.append(self._slowest(self._seconds(operation)))
        return median(found[WARM_UP:])

    def _slowest(self, seconds: float) -> float:
        """The most of any worker. Collective over these."""
        if self.setting.workers == 1:
            return seconds
        most = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.item()

    def _seconds(self, operation: Callable[[], object]) -> float:
        self._synchronize()
        started = time.perf_counter()
        operation()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Measurement:
    """`take` returns a number that `text` shows under `label`; `ranks`: how many processes take it."""

    label: str
    take: Callable[[Seat], float]
    text: Callable[[float], str]
    ranks: Callable[[Setting], int] = lambda setting: setting.workers


def matrix_flops(seat: Seat) -> float:
    """FLOP/s of a square matrix product."""
    n = seat.setting.sizes.matrix
    a, out = seat.tensor(n, n), seat.tensor(n, n)
    return 2 * n**3 / seat.median_s(lambda: torch.matmul(a, a, out=out))


def memory_bandwidth(seat: Seat) -> float:
    """Bytes/s that a copy too large for any cache reads and writes."""
    size = seat.setting.sizes.copy_bytes
    source = torch.ones(size, dtype=torch.uint8, device=seat.device)
    target = torch.zeros_like(source)
    return 2 * size / seat.median_s(lambda: target.copy_(source))


def host_bandwidth(seat: Seat) -> float:
    """Bytes/s from pinned host memory to the GPU."""
    size = seat.setting.sizes.copy_bytes
    source = torch.ones(size, dtype=torch.uint8).pin_memory()
    target = torch.zeros(size, dtype=torch.uint8, device=seat.device)
    return size / seat.median_s(lambda: target.copy_(source, non_blocking=True))


def overhead_bytes(seat: Seat) -> float:
    """Memory of the GPU that no tensor has: the CUDA context, libraries and NCCL, all used before."""
    free, total = torch.cuda.mem_get_info(seat.device)
    return total - free - torch.cuda.memory_reserved(seat.device)


def score_flops(seat: Seat) -> float:
    """FLOP/s of forward passes over whole sequences."""
    return _forward_flops(seat) / _beyond_least_s(seat, _scoring)


def train_flops(seat: Seat) -> float:
    """FLOP/s of forward and backward passes: the latter counts twice."""
    return 3 * _forward_flops(seat) / _beyond_least_s(seat, _training)


def bf16_train_flops(seat: Seat) -> float:
    """The same of a model in bf16."""
    return 3 * _forward_flops(seat) / _beyond_least_s(seat, _training, "bf16")


def score_layer_overhead_s(seat: Seat) -> float:
    """Seconds of one narrow layer's forward pass over a row of one token."""
    return seat.median_s(_scoring(seat.model(NARROW), seat.pack(1, 1)), MANY_RUNS) / LAYERS


def train_layer_overhead_s(seat: Seat) -> float:
    """The same, forward and backward."""
    return seat.median_s(_training(seat.model(NARROW), seat.pack(1, 1)), MANY_RUNS) / LAYERS


def _scoring(model: GPTModel, pack: Pack) -> Callable[[], object]:
    return torch.no_grad()(lambda: _logits(model, pack))


def _training(model: GPTModel, pack: Pack) -> Callable[[], object]:
    return lambda: _logits(model, pack).sum().backward()


def _beyond_least_s(
    seat: Seat, passing: Callable[[GPTModel, Pack], Callable[[], object]], dtype: WeightDType | None = None
) -> float:
    """Seconds of a pass over all rows. On CPUs without those that one token takes, in which weights are read
    and operations begin; GPUs compute meanwhile."""
    sizes = seat.setting.sizes
    model = seat.model(sizes.hidden, dtype=dtype)
    whole_s = seat.together_s(passing(model, seat.pack(sizes.rows, sizes.length)))
    if seat.setting.platform == "cuda":
        return whole_s
    return max(whole_s - seat.together_s(passing(model, seat.pack(1, 1))), whole_s / 4)


def _logits(model: GPTModel, pack: Pack) -> Tensor:
    """Of all tokens, ``[tokens, vocab]``."""
    return OutputMatrix.of(model).logits(forward(model, pack, True).squeeze(0))


def _forward_flops(seat: Seat) -> float:
    """2 FLOP per weight and token, and causal attention to half the sequence."""
    shape, sizes = _shape(seat.setting.sizes.hidden), seat.setting.sizes
    return forward_flops(shape, sizes.rows * sizes.length, sizes.length / 2)


def layer_overhead_s(seat: Seat) -> float:
    """Seconds of one narrow layer for one token: what is left of a decoding step without any work."""
    return _token_step_s(seat, NARROW, 1) / LAYERS


def decode_flops(seat: Seat) -> float:
    """FLOP/s of what further rows add to a decoding step of one."""
    sizes = seat.setting.sizes
    many_s, one_s = (_token_step_s(seat, sizes.hidden, rows, together=True) for rows in (TOGETHER, 1))
    flops = forward_flops(_shape(sizes.hidden), TOGETHER - 1, sizes.decoded / 2)
    return flops / max(many_s - one_s, many_s / 4)


def decode_weights(seat: Seat) -> float:
    """Bytes/s of weights that a decoding step of one row reads, in which layers take their least time
    besides."""
    hidden = seat.setting.sizes.hidden
    step_s, least_s = _token_step_s(seat, hidden, 1), _token_step_s(seat, NARROW, 1)
    return matmul_parameters(_shape(hidden)) * seat.setting.dtype.itemsize / max(step_s - least_s, step_s / 4)


def _token_step_s(
    seat: Seat, hidden: int, rows: int, split: Groups | None = None, together: bool = False
) -> float:
    """Seconds of one more token for each of some rows; `together`: on the slowest worker."""
    time_s = seat.together_s if together else seat.median_s
    model, prompts, numbers = seat.model(hidden, split), from_lists([[1]] * rows), torch.arange(rows)
    more = seat.setting.sizes.decoded

    def decode_s(tokens: int) -> float:
        never = EndRule(-1)  # -1 is no token
        sampling = Sampling(tokens, 1.0, seed=0, step=0, stream=0, ends=never)
        return time_s(lambda: generate(model, prompts, numbers, sampling, rows, seat.device))

    return (decode_s(more + 1) - decode_s(1)) / more


def _shape(hidden: int) -> ModelShape:
    """A small Llama with few tokens, so that layers are nearly all of it."""
    heads = hidden // 64
    return ModelShape(
        "llama", LAYERS, hidden, heads, num_kv_heads=heads, head_dim=64, ffn=3 * hidden,
        vocab=VOCABULARY, max_positions=4096, rope_theta=1e4, norm_eps=1e-5, tied=False, qkv_bias=False,
    )  # fmt: skip


def all_reduce_s(seat: Seat, size_bytes: int) -> float:
    """Seconds of an all-reduce of `size_bytes` on each of two workers."""
    values = torch.ones(size_bytes // 4, device=seat.device)
    return seat.median_s(lambda: dist.all_reduce(values, group=seat.pair))


def link_latency_s(seat: Seat) -> float:
    """Seconds besides those for bytes of each of the two operations that a ring all-reduce over two ranks is.

    On CPUs in decoding, where one rank waits for the other after each product, and the thread that sends has
    to be woken beside threads that compute: nothing of this is seen by an all-reduce alone.
    """
    alone_s = all_reduce_s(seat, 4) / 2
    if seat.setting.platform == "cuda" or not seat.split:
        return alone_s
    # The layers and the embeddings end in an all-reduce each, and logits are gathered.
    operations = 2 * (2 * LAYERS + 1) + 1
    whole_s, split_s = _token_step_s(seat, NARROW, 1), _token_step_s(seat, 2 * NARROW, 1, seat.split)
    return max((split_s - whole_s) / operations, alone_s)


def link_bandwidth(seat: Seat) -> float:
    """Bytes/s: over two ranks a ring all-reduce sends each byte once, and takes twice the latency."""
    size = seat.setting.sizes.all_reduce_bytes
    empty_s = all_reduce_s(seat, 4)
    return size / max(all_reduce_s(seat, size) - empty_s, empty_s)


def _pair(setting: Setting) -> int:
    return 2 if setting.ranks > 1 else 0


def _gpus(setting: Setting) -> int:
    return setting.workers if setting.platform == "cuda" else 0


def _cpus(setting: Setting) -> int:
    """GPUs read weights meanwhile, which is what their steps take."""
    return setting.workers if setting.platform == "cpu" else 0


def _flops(value: float) -> str:
    return f"{units.count(value)}FLOP/s"


def _microseconds(value: float) -> str:
    return f"{value * 1e6:.0f} µs"


MEASUREMENTS: Mapping[str, Measurement] = {
    "matrix_flops": Measurement("matrix product", matrix_flops, _flops),
    "score_flops": Measurement("model, forward", score_flops, _flops),
    "train_flops": Measurement("model, and backward", train_flops, _flops),
    "bf16_train_flops": Measurement("the same in bf16", bf16_train_flops, _flops, _cpus),
    "layer_overhead_s": Measurement("layer, least time", layer_overhead_s, _microseconds),
    "score_layer_overhead_s": Measurement("layer, whole rows", score_layer_overhead_s, _microseconds, _cpus),
    "train_layer_overhead_s": Measurement(
        "layer, and backward", train_layer_overhead_s, _microseconds, _cpus
    ),
    "decode_flops": Measurement("model, one token a row", decode_flops, _flops, _cpus),
    "decode_weights": Measurement("model, weights read", decode_weights, units.rate, _cpus),
    "memory_bandwidth": Measurement("copy in memory", memory_bandwidth, units.rate),
    "host_bandwidth": Measurement("copy from host memory", host_bandwidth, units.rate, _gpus),
    "link_bandwidth": Measurement("link of two workers", link_bandwidth, units.rate, _pair),
    "link_latency_s": Measurement("link, latency", link_latency_s, _microseconds, _pair),
    "overhead_bytes": Measurement("memory of CUDA itself", overhead_bytes, units.size, _gpus),
}
