"""What a device reaches: rates by kind of work and number format, and its least times."""

from __future__ import annotations

from typing import Literal

from hflow.plan.cluster import Cluster, DeviceKind
from hflow.plan.flops import attention_flops
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape

BYTES = {"f32": 4, "bf16": 2}
Work = Literal["train", "score", "prefill", "decode"]

# A fused attention kernel reaches about half the rate of large matrix products (FlashAttention-2,
# arXiv:2307.08691, figures 4 to 6).
ATTENTION_RATE = 0.5
# Of GPUs f32 products without TF32 against bf16 ones, by data sheet: 19.5 of 312 TFLOP/s on A100, 67 of 989
# on H100.
F32_RATE = 1 / 16
# Norms, projections, rotary positions, attention, gated MLP, residual sums of one layer's forward pass.
KERNELS_PER_LAYER = 12
# Reads and writes of a layer's residual stream: two norms (one of each), two sums (two and one).
RESIDUAL_ACCESSES = 10


def device_of(cluster: Cluster, mesh: Mesh) -> DeviceKind:
    """The kind of the devices of `mesh`; of a mixed one the slowest, for which the others wait."""
    if not cluster.more:
        return cluster.device
    return min({cluster.kind(d) for d in mesh.devices}, key=lambda kind: (kind.flops, kind.name))


def peak_flops(device: DeviceKind, dtype: str) -> float:
    """FLOP/s of matrix products in a number format: at best, of which `rate` is a share."""
    if device.platform == "cuda":
        return device.flops * (F32_RATE if dtype == "f32" else 1.0)
    return device.flops if dtype == "f32" or device.bf16_flops is None else device.bf16_flops


def rate(device: DeviceKind, work: Work, dtype: str) -> float:
    """FLOP/s of matrix products; of decoding, of one token of each row."""
    c = device.calibration
    shares = {"train": c.train_efficiency, "score": c.score_efficiency, "prefill": c.prefill_efficiency}
    shares["decode"] = c.decode_efficiency or c.prefill_efficiency
    return peak_flops(device, dtype) * shares[work]


def products_s(
    flops: float, parameters: float, work: Work, dtype: str, device: DeviceKind, parts: int = 1
) -> float:
    """Products with `parameters` weights that are split over `parts` devices: the larger of computing and of
    reading the weights (roofline). Their sum, where it was measured how fast weights are read: a CPU has to
    bring each weight into its caches, and its products of a few rows hide nothing of that."""
    computing, size = flops / rate(device, work, dtype), parameters * BYTES[dtype]
    share = device.calibration.weights_efficiency
    if share is not None:
        return (computing + size / (device.memory_bandwidth * share)) / parts
    return max(computing, stream_s(size, device)) / parts


def attention_work(shape: ModelShape, tokens: float, context: float) -> float:
    """The attention of all layers, in FLOP of matrix products that take as long."""
    return attention_flops(shape, tokens, context) / ATTENTION_RATE


def layer_latency_s(device: DeviceKind, work: Work) -> float:
    """The least time of one layer's forward pass, however few its tokens; in training a third of that of both
    passes."""
    if work == "score" and device.score_layer_overhead_s is not None:
        return device.score_layer_overhead_s
    if work == "train" and device.train_layer_overhead_s is not None:
        return device.train_layer_overhead_s / 3
    return device.layer_overhead_s + KERNELS_PER_LAYER * device.kernel_latency_s


def residual_s(shape: ModelShape, tokens: float, dtype: str, device: DeviceKind) -> float:
    """Norms and residual sums of all layers, bound by memory. Every rank of tp does them for all tokens."""
    return stream_s(RESIDUAL_ACCESSES * shape.num_layers * tokens * shape.hidden * BYTES[dtype], device)


def stream_s(size_bytes: float, device: DeviceKind) -> float:
    """Reading or writing `size_bytes` of the device's own memory."""
    return size_bytes / (device.memory_bandwidth * device.calibration.decode_bandwidth_efficiency)
