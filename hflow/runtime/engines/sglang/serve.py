"""The program that a worker starts: SGLang's HTTP server in this process, its schedulers in children.

    python -m hflow.runtime.engines.sglang.serve < request.json

Ends when the worker ends, and all its children with it.
"""

# SGLang is installed on demand
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hflow.graph.adapter import Adapter
from hflow.plan.engines.sglang import SERVER_PROFILE
from hflow.runtime.engines.lifetime import die_with
from hflow.runtime.engines.sglang import cpu
from hflow.runtime.engines.sglang.hosts import ServerHosts
from hflow.runtime.engines.sglang.options import ServerOptions
from hflow.runtime.model_folder import read_object

SERVER = "HFLOW_SGLANG_SERVER"  # in the environment of its children: the process id of the server

# SGLang refuses prompts, and shortens responses without a word, that come within this of its own limits.
SPARE = 6

# Of the tokens that running requests may still make, SGLang keeps this share free at first
# (SGLANG_INIT_NEW_TOKEN_RATIO), and less with each step: `admission_arguments`.
SGLANG_FORESIGHT = 0.7

# In which it must make one token, when idle, to be healthy. Its own 20 s are few on cores that others use. Of
# one that died, the connection tells at once.
HEALTH_S = 120

# A child of a server with CUDA, a new program (without CUDA, a fork: `cpu.fork_children`): before all else,
# multiprocessing imports its parent's main module. SGLang's children ask for the same as this, but only after
# their imports, and their parent may have died by then.
if __name__ == "__mp_main__":
    die_with(int(os.environ[SERVER]))


@dataclass(frozen=True)
class Request:
    """`key` is what requests must carry, `parent` the process that asks, `folder` the server's own."""

    options: ServerOptions
    port: int
    key: str
    parent: int
    folder: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        values = json.loads(text)
        options = values.pop("options")
        options |= {"devices": tuple(options["devices"]), "cores": tuple(options["cores"])}
        if told := options["adapter"]:
            options["adapter"] = Adapter(told["rank"], told["alpha"], tuple(told["targets"]))
        options["hosts"] = ServerHosts(**options["hosts"])
        return cls(ServerOptions(**options), **values)


def environment(folder: str, hosts: ServerHosts) -> dict[str, str]:
    """For CPUs and CUDA alike."""
    return meeting_place(folder, hosts) | {
        SERVER: str(os.getpid()),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by SPARE; see check_length
        # Other models may lie on some of its devices only; `server` checks that the KV cache fits.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(HEALTH_S),
        # In the long run as many tokens come free as are made: the cache's margin is all that is kept.
        "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0",
        # Models are local folders: nothing is looked up elsewhere, and nobody is told.
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def meeting_place(folder: str, hosts: ServerHosts) -> dict[str, str]:
    """Where ranks meet, and how they talk. SGLang's own store would listen on every interface."""
    if hosts.count == 1:
        store = (Path(folder) / "store").as_uri()
        return {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": store,
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }
    return {  # by the interfaces that the worker uses
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"tcp://{hosts.store}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the worker's: no rank opens one there
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",  # it would listen for other hosts, besides gloo
    }


def arguments(options: ServerOptions, port: int, key: str) -> dict[str, Any]:
    """SGLang's arguments, for CPUs and CUDA alike.

    Deterministic inference gives a request with a `sampling_seed` the same tokens alone and in any batch.
    Requests and answers are token ids; texts are the server's business only where one ends a response.
    """
    loaders = [options.weight_loader] if options.weight_loader else None
    # The attention that SGLang prefers knows half precision only.
    attention = {"attention_backend": "triton"} if options.dtype == "float32" else {}
    return (
        attention
        | memory_arguments(options)
        | admission_arguments(options)
        | {
            "model_path": options.model_path,
            "dtype": options.dtype,
            "tp_size": options.tp,
            "nnodes": options.hosts.count,
            "node_rank": options.hosts.number,
            "dist_init_addr": options.hosts.store or None,
            "host": "127.0.0.1",
            "port": port,
            "api_key": key,
            "context_length": options.max_length + SPARE,
            "max_total_tokens": options.max_tokens + SPARE,
            "max_running_requests": options.max_running,
            "random_seed": options.seed,
            "enable_deterministic_inference": True,
            "disable_radix_cache": True,
            "enable_memory_saver": options.sleeps,
            "custom_weight_loader": loaders,
            "sleep_on_idle": True,  # its scheduler would take a core while other nodes run
            "skip_tokenizer_init": not options.reads_texts,
            "enable_custom_logit_processor": options.truncates,
            "enable_return_routed_experts": options.tells_routes,
            "grammar_backend": "none",
            "log_level": "warning",
        }
    )


def memory_arguments(options: ServerOptions) -> dict[str, Any]:
    """How much of what is free SGLang may fill with weights and KV cache: all but the plan's reserve. Left
    alone it keeps a share of all that is there free, and so finds no room beside other models. That the KV
    cache is no larger than it must be, ``max_total_tokens`` says."""
    if not options.devices:
        return {}
    chunk = {"chunked_prefill_size": SERVER_PROFILE.chunk_tokens}
    if not options.free_bytes:
        return chunk
    return chunk | {"mem_fraction_static": round(1 - options.reserve_bytes / options.free_bytes, 4)}


def admission_arguments(options: ServerOptions) -> dict[str, Any]:
    """When SGLang begins another request. Left alone, it keeps room for 0.7 of what the running ones may
    still make, and so has fewer at once than the cache was made for."""
    if options.foresight >= 1:
        return {}
    return {"schedule_conservativeness": round(options.foresight / SGLANG_FORESIGHT, 4)}


def without_its_own_ends(model: Path, view: Path) -> Path:
    """The model's folder anew, with which SGLang ends responses where a request says, which is at the
    tokenizer's end, and not also at what ``config.json`` and ``generation_config.json`` add to it."""
    view.mkdir()
    for file in model.iterdir():
        if file.name not in ("config.json", "generation_config.json"):
            (view / file.name).symlink_to(file.resolve())
    config = read_object(model / "config.json")
    (view / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return view


def check_length(options: ServerOptions) -> None:
    """Instead of SGLang's own check, which SPARE would fail."""
    config = Path(options.model_path) / "config.json"
    if not config.is_file():
        raise FileNotFoundError(str(config))
    positions = read_object(config)["max_position_embeddings"]
    if options.max_length > positions:
        raise ValueError(f"requests of {options.max_length} tokens, but the model has {positions} positions")


def name_instance(name: str) -> None:
    """Instead of at random: SGLang's files in shared memory bear the name (`shared_memory.remove_of`)."""
    from sglang.srt.server_args import PortArgs

    at_random = PortArgs.init_new

    def named(*given: Any, **options: Any) -> Any:
        return replace(at_random(*given, **options), instance_id=name)

    PortArgs.init_new = staticmethod(named)


def wait_until_it_listens(server_args: Any) -> bool:
    """In the place of SGLang's warm-up. With none, its next step is to ask itself something, and fail."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    while not _listens(server_args.port):
        time.sleep(0.05)
    manager: Any = get_global_state().tokenizer_manager
    manager.server_status = ServerStatus.Up
    return True


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    request = Request.from_json(sys.stdin.read())
    die_with(request.parent)
    options = request.options
    check_length(options)
    view = without_its_own_ends(Path(options.model_path), Path(request.folder) / "model")
    os.environ.update(environment(request.folder, options.hosts))
    on_cpu = not options.devices
    if on_cpu:
        cpu.prepare(options.cores, options.ranks, options.hosts.count)

    from sglang.srt.entrypoints.http_server import launch_server  # reads the environment
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.server_args import ServerArgs

    from hflow.runtime.engines.sglang.adapter import run_adapted  # imports torch

    given = arguments(options, request.port, request.key)
    given["model_path"] = str(view)
    run_scheduler = run_scheduler_process
    if on_cpu:
        given |= cpu.arguments()
        run_scheduler = cpu.run_scheduler
        cpu.fork_children()
    if options.adapter:
        run_scheduler = partial(run_adapted, options.adapter, run_scheduler)
    name_instance(Path(request.folder).name)
    launch_server(
        ServerArgs(**given),
        execute_warmup_func=wait_until_it_listens,
        run_scheduler_process_func=run_scheduler,
    )


if __name__ == "__main__":
    main()
