"""What an engine can do, what it costs and what it holds: all that a plan asks of it.

The planner, the cost model and the checks read a profile and never ask which engine they have. Profiles are
data: they need neither the engine's packages nor the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hflow.graph.ir import OpKind
from hflow.plan.activations import forward_elements
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.workload import Workload

Platform = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class ServerProfile:
    """Of an engine that has processes of its own serve a model, with a copy of the weights that nobody else
    can use. One is made for each data-parallel replica; each of its hosts has equally
    many of its ranks.

    `token_step_s`: seconds that a token for every row takes beside its kernels, by platform.
    `process_bytes`: of the host's memory, what the server's processes take of each device's share.
    `chunk_tokens`: the most tokens of prompts that it reads at once. `sleeps_on`: the platforms on which it
    can give its device memory back while it does not generate.
    """

    process_bytes: int
    chunk_tokens: int
    token_step_s: Mapping[Platform, float] = field(default_factory=dict[Platform, float])
    sleeps_on: tuple[Platform, ...] = ()

    def sleeps(self, platform: str, renewed: bool) -> bool:
        """Whether its weights and KV cache are only there while it generates. It gives them back after its
        last generation in a step, where it can and where its weights come anew in each step (`renewed`)."""
        return platform in self.sleeps_on and renewed

    def reserve_bytes(
        self, shape: ModelShape, element_bytes: int, work: Workload, mesh: Mesh, wave: int
    ) -> int:
        """Of a device's memory, what it computes with beside weights and KV cache: a chunk of prompts, or
        `wave` rows of logits and their float32 copy."""
        logits = wave * shape.outputs * (element_bytes + 4)
        tokens = min(self.chunk_tokens, wave * work.prompt)
        return max(forward_elements(shape, tokens, mesh) * element_bytes, logits)


@dataclass(frozen=True)
class EngineProfile:
    """`title`: its name in messages. `ops`: the kinds of nodes that it runs, `pipelines` those of them that
    it can split into pipeline stages, `cuts_rows` those whose rows it can cut over context-parallel ranks,
    and over tp by sequence parallelism, and `expert_parallel` those in which data-parallel ranks can share
    experts. `tensor_parallel`: whether it splits a model over tp, and then `vocab_unit`: the vocabulary must
    be a multiple of it.

    `in_flight`: it takes over new weights while it generates. `donates`: a model that it trains can give the
    memory of its weights to a copy of them on the same engine. `offloads`: weights, or what trains them, can
    wait in the host's memory. `server`: what serves, of an engine that does not compute in the worker.
    `routes`: the kinds of nodes in which it tells, or follows, the experts that a token's routers chose.
    `refills`: as soon as a row ends, another one takes its place (continuous batching); else rows are
    generated in waves, and the next begins when the last row of one has ended.
    `pages`: its KV cache is one pool, of which rows take as they grow, and where it is full the engine
    retracts rows; else each row has room for its greatest length from the first token on.
    `one_shot_sums`: on CUDA it has kernels that sum over tp in one step, where there is little to sum, on
    ranks of one host.
    `lacks`: what of a model it would leave out without a word, as a phrase; empty: nothing.
    """

    title: str
    ops: tuple[OpKind, ...]
    pipelines: tuple[OpKind, ...] = ()
    cuts_rows: tuple[OpKind, ...] = ()
    expert_parallel: tuple[OpKind, ...] = ()
    routes: tuple[OpKind, ...] = ()
    tensor_parallel: bool = False
    vocab_unit: int = 1
    in_flight: bool = False
    donates: bool = False
    offloads: bool = False
    server: ServerProfile | None = None
    refills: bool = False
    pages: bool = False
    one_shot_sums: bool = False
    lacks: Callable[[ModelShape], str] = lambda _: ""

    def token_step_s(self, platform: Platform) -> float:
        """Seconds that a token for every row takes beside its kernels."""
        return self.server.token_step_s.get(platform, 0.0) if self.server else 0.0

    def sleeps(self, platform: str, renewed: bool) -> bool:
        """Whether a server is only there while it generates; see `ServerProfile.sleeps`."""
        return self.server is not None and self.server.sleeps(platform, renewed)
