"""What a worker asks of an SGLang server."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.graph.adapter import Adapter
from hflow.plan.workload import Workload
from hflow.runtime.engines.sglang.hosts import ONE_HOST, ServerHosts

LEAST_FORESIGHT = 0.01


@dataclass(frozen=True)
class ServerOptions:
    """`hosts` have equally many of the server's `tp` ranks. `devices` are the entries of CUDA_VISIBLE_DEVICES
    for those of this host; none: it runs on CPUs.

    `cores` are those that a server on CPUs may use, shared out among its ranks; none: all that this process
    may. Its KV cache holds `max_tokens`. A request has at most `max_length` tokens, prompt and response
    together, and at most `max_running` requests run at once. `sleeps`: its device memory can be released and
    taken again (CUDA). `weight_loader` is the import path of a function(model, named_tensors) that a weight
    update may name as its `load_format`. `reserve_bytes`: what a server with devices needs of each beside
    weights and KV cache; `free_bytes`: what it finds free there when it starts (0: nobody has looked).
    `truncates`: requests may bring a processor of logits (`truncate`). `reads_texts`: it has a tokenizer, for
    requests that end with a text. `adapter`: the model has one, which does not lie in its folder.
    `tells_routes`: it keeps which experts its routers choose, for requests that ask for them.
    `foresight`: of the tokens that running requests may still make, the share that is kept free when another
    one begins; 1 where the cache has room for all.

    Raises:
        ValueError: the options contradict each other.
    """

    model_path: str
    dtype: str  # "float32" or "bfloat16"
    tp: int
    devices: tuple[str, ...]
    cores: tuple[int, ...]
    max_running: int
    max_tokens: int
    max_length: int
    seed: int
    sleeps: bool
    weight_loader: str = ""
    reserve_bytes: int = 0
    free_bytes: int = 0
    truncates: bool = False
    reads_texts: bool = False
    adapter: Adapter | None = None
    tells_routes: bool = False
    foresight: float = 1.0
    hosts: ServerHosts = ONE_HOST

    def __post_init__(self) -> None:
        if self.devices and len(self.devices) != self.ranks:
            raise ValueError(f"{self.ranks} ranks on {len(self.devices)} devices")
        if self.devices and self.cores:
            raise ValueError("cores are for servers on CPUs; this one has devices")
        if self.max_tokens < self.max_length:
            raise ValueError(
                f"a KV cache of {self.max_tokens} tokens does not hold a request of {self.max_length}"
            )
        if self.sleeps and not self.devices:
            raise ValueError("only the memory of CUDA devices can be released")

    @property
    def ranks(self) -> int:
        """On this host."""
        return self.tp // self.hosts.count


def foresight(rows: int, room: int, work: Workload) -> float:
    """`ServerOptions.foresight` with which `rows` requests can begin at once in a cache of `room` tokens,
    where SGLang wants the greatest length free for the last of them."""
    if room >= rows * work.sequence:
        return 1.0
    of_each = (room - work.sequence) / rows - work.prompt
    return min(1.0, max(LEAST_FORESIGHT, of_each / work.response))
