"""One execution of a node on a mesh: what its time depends on, and the messages between its devices."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.cost.comm import (
    all_gather_s,
    all_reduce_s,
    axis_link,
    crosses_hosts,
    one_shot_all_reduce_s,
    send_s,
)
from hflow.cost.context import context_bytes
from hflow.cost.device import BYTES, device_of
from hflow.cost.experts import exchange_s
from hflow.plan.cluster import Cluster, DeviceKind
from hflow.plan.engine_registry import profile_of
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload


@dataclass(frozen=True)
class Execution:
    """`micro_batch` rows per replica pass through the model at once; of a generate node, a wave of them."""

    shape: ModelShape
    dtype: str
    work: Workload
    mesh: Mesh
    micro_batch: int
    cluster: Cluster
    strategy: Strategy = PLAIN

    @property
    def device(self) -> DeviceKind:
        return device_of(self.cluster, self.mesh)

    def activation_bytes(self, tokens: float) -> float:
        """What stage gives to stage, and an all-reduce over tp sums."""
        return tokens * self.shape.hidden * BYTES[self.dtype]

    def messages_s(self, tokens: float) -> float:
        """Of each layer, in one direction: two all-reduces over tp, the way to the experts and back, and keys
        and values of all tokens over cp, of which `tokens` are one rank's. With sequence parallelism an
        all-gather and a reduce-scatter each take the place of an all-reduce, and whole experts need neither:
        each rank sends its own part of the tokens."""
        size, link = self.activation_bytes(tokens), axis_link(self.cluster, self.mesh, "tp")
        if self.strategy.sp:
            spared = self.shape.expert_layers / self.shape.num_layers if self.strategy.whole_experts else 0
            seconds = (4 - 2 * spared) * all_gather_s(size, self.mesh.tp, link)
        else:
            seconds = 2 * self._tp_sum_s(size)
        seconds += exchange_s(self.shape, size, self.mesh, self.cluster, self.strategy)
        if self.mesh.cp > 1:
            whole = context_bytes(self.shape, self.dtype, tokens * self.mesh.cp, self.mesh)
            seconds += all_gather_s(whole, self.mesh.cp, axis_link(self.cluster, self.mesh, "cp"))
        return seconds * self.shape.num_layers

    def regathered_s(self, tokens: float) -> float:
        """Of each layer in the backward pass, with sequence parallelism: what two products have read is
        gathered over tp once more; of experts the copies that they have read are kept."""
        if not self.strategy.sp:
            return 0.0
        link = axis_link(self.cluster, self.mesh, "tp")
        size = self.activation_bytes(tokens)
        products = 2 * self.shape.num_layers - self.shape.expert_layers
        return products * all_gather_s(size, self.mesh.tp, link)

    def end_messages_s(self, tokens: float, predicted: float, gradients: bool) -> float:
        """Of one pass, outside the layers: the embeddings of `tokens` are summed over tp, which splits the
        vocabulary, and so are, of the `predicted` ones, the greatest logit and the sums that give a log-prob.
        With sequence parallelism the embeddings are scattered and the head gathers its hidden states. With
        `gradients`, those of hidden states are summed. Of pipeline stages the last one's count."""
        ranks, link = self.mesh.tp, axis_link(self.cluster, self.mesh, "tp")
        if ranks == 1:
            return 0.0
        size, sp = self.activation_bytes(tokens), self.strategy.sp
        gather_s = all_gather_s(size, ranks, link)
        seconds = gather_s if sp else 0.0
        if self.mesh.pp == 1:
            seconds += (1 + gradients) * gather_s if sp else all_reduce_s(size, ranks, link)
        if self.shape.head == "scalar":
            return seconds
        summed = [4 * predicted, 3 * 4 * predicted]
        if gradients:
            summed.append(self.activation_bytes(predicted))
        return seconds + sum(all_reduce_s(each, ranks, link) for each in summed)

    def sampling_messages_s(self, sampled: float, tokens: float) -> float:
        """Of reading `tokens` in generation, outside the layers: embeddings as above; the logits of those
        that are `sampled` are gathered on all ranks of tp."""
        ranks, link = self.mesh.tp, axis_link(self.cluster, self.mesh, "tp")
        if ranks == 1:
            return 0.0
        logits = sampled * self.shape.vocab * BYTES[self.dtype]
        return self._tp_sum_s(self.activation_bytes(tokens)) + all_gather_s(logits, ranks, link)

    def _tp_sum_s(self, size_bytes: float) -> float:
        """Of an all-reduce over tp."""
        one_shot = profile_of(self.strategy.engine).one_shot_sums and self.device.platform == "cuda"
        inside = not crosses_hosts(self.cluster, self.mesh, "tp")
        sum_s = one_shot_all_reduce_s if one_shot and inside else all_reduce_s
        return sum_s(size_bytes, self.mesh.tp, axis_link(self.cluster, self.mesh, "tp"))

    def hop_s(self, tokens: float) -> float:
        """The activations on their way to the next stage."""
        if self.mesh.pp == 1:
            return 0.0
        size = self.activation_bytes(tokens)
        size = size / self.mesh.tp if self.strategy.sp else size
        return send_s(size, axis_link(self.cluster, self.mesh, "pp"))
