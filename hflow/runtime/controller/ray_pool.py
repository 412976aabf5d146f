"""Workers as Ray actors: Ray starts, places and buries processes; everything else is ours.

One call per worker and step is all that passes through Ray; values travel between workers over
torch.distributed. Import this module after `local_ray` has set Ray's environment.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from hflow.diagnostics import Diagnostic, HflowError
from hflow.runtime.controller.local_ray import LocalRay
from hflow.runtime.controller.pool import Report, root_cause
from hflow.runtime.worker.failure import Failure
from hflow.runtime.worker.worker import Worker

OBJECT_STORE_BYTES = 100 * 2**20  # programs and reports only
PLACEMENT_WAIT_S = 60
START_WAIT_S = 300  # to import torch and Megatron, with cold disks
GRACE_S = 10  # for survivors to give up after a failure


class _RayWorker(Worker):
    """The worker as an actor. Calls run one after another in one thread; control calls in another."""

    def __init__(self, device: str, threads: int, folder: str):
        if Path(folder).is_dir():
            os.chdir(folder)  # paths in a graph are relative to where hflow was started
        super().__init__(device, threads)

    def join_at(self, host: str, port: int, generation: int, rank: int, size: int) -> Report:
        store = TCPStore(host, port, None, False)
        return self.join(store, generation, rank, size)

    def ready(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        super().abort()

    @ray.method(concurrency_group="control")
    def where(self) -> str:
        return super().where()


class RayPool:
    def __init__(self, size: int, ray_at: LocalRay | str, platform: str = "cpu", threads: int = 1):
        """Start Ray, or join it at an address, and start `size` workers with `threads` CPU threads each.

        Raises:
            HflowError: HF404 when Ray cannot be started or the workers cannot be placed.
        """
        self._local = ray_at if isinstance(ray_at, LocalRay) else None
        self._actors: list[Any] = []
        self._generation = 0
        self._size = 0
        try:
            self._start_ray(size, ray_at)
            self._store_address, self._store = _open_store(self._local is not None)
            self._group = _place(size, platform)
            self._actors = _start_actors(self._group, size, platform, threads, self._local is not None)
        except BaseException:
            self.close()
            raise

    def _start_ray(self, size: int, ray_at: LocalRay | str) -> None:
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if isinstance(ray_at, LocalRay):
            options |= {
                "num_cpus": size,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(ray_at.folder),
            }
        else:
            _check_reachable(ray_at)
            options["address"] = ray_at
        try:
            ray.init(**options)
        except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise HflowError(Diagnostic("HF404", f"Ray cannot be reached or started: {error}")) from None

    def form(self, size: int) -> None:
        if size > len(self._actors):
            message = f"the plan needs {size} workers; there are {len(self._actors)}"
            raise HflowError(Diagnostic("HF404", message))
        self._gather([a.leave.remote() for a in self._actors])
        self._size = size
        self._generation += 1
        host, port = self._store_address
        arguments = [(host, port, self._generation, rank, size) for rank in range(size)]
        self._gather([a.join_at.remote(*args) for a, args in zip(self._actors, arguments)])

    def call(self, method: str, *arguments: Any) -> list[Report]:
        shared = [ray.put(a) if method == "load" else a for a in arguments]
        return self._gather([getattr(a, method).remote(*shared) for a in self._actors[: self._size]])

    def where(self) -> str:
        with suppress(RayError):
            return ray.get(self._actors[0].where.remote(), timeout=0.5)
        return ""

    def close(self) -> None:
        """End workers and, if it is ours, Ray; leave no process and no temporary file."""
        children = psutil.Process().children(recursive=True) if self._local else []
        actors, self._actors = self._actors, []
        if ray.is_initialized():
            for actor in actors:
                ray.kill(actor)
            ray.shutdown()
        _end(children)
        if self._local:
            self._local.remove()

    def _gather(self, calls: list[ray.ObjectRef]) -> list[Report]:
        reports: dict[int, Report] = {}
        rank_of = {call: rank for rank, call in enumerate(calls)}
        deadline: float | None = None
        while len(reports) < len(calls):
            waiting = [c for c in calls if rank_of[c] not in reports]
            done, _ = ray.wait(waiting, num_returns=1, timeout=None if deadline is None else GRACE_S)
            reports.update({rank_of[call]: _result(call) for call in done})
            failed = any("error" in r for r in reports.values())
            if failed and deadline is None:
                deadline = time.monotonic() + GRACE_S
                self._abort()
            if deadline is not None and (not done or time.monotonic() > deadline):
                break
        if any("error" in r for r in reports.values()):
            raise root_cause([reports.get(rank, {}) for rank in range(len(calls))])
        return [reports[rank] for rank in range(len(calls))]

    def _abort(self) -> None:
        told = [actor.abort.remote() for actor in self._actors[: self._size]]
        ray.wait(told, num_returns=len(told), timeout=GRACE_S)  # so that none comes after the next start


def _result(call: ray.ObjectRef) -> Report:
    try:
        return ray.get(call)
    except RayActorError as error:
        text = str(error).strip().splitlines()
        return _dead(f"the worker process died: {text[-1] if text else error}")
    except (RayError, GetTimeoutError) as error:
        return _dead(f"the worker cannot be reached: {error}")


def _dead(message: str) -> Report:
    return {"error": Failure(Diagnostic("HF402", message))}


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes before it says that nobody listens."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        return  # `auto`, or a form that Ray reads
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=10).close()
    except OSError as error:
        raise HflowError(Diagnostic("HF404", f"no Ray cluster answers at `{address}`: {error}")) from None


def _open_store(local: bool) -> tuple[tuple[str, int], TCPStore]:
    """The rendezvous store. The socket is bound before the store exists, so no port can be snatched."""
    host = "127.0.0.1" if local else ray.util.get_node_ip_address()
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    return (host, port), store


def _place(size: int, platform: str) -> PlacementGroup:
    resources = {"CPU": 1.0, "GPU": 1.0} if platform == "cuda" else {"CPU": 1.0}
    group = placement_group([resources] * size, strategy="PACK")
    if not group.wait(PLACEMENT_WAIT_S):
        has = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
        message = f"{size} workers with {resources} each cannot be placed; the Ray cluster has {has}"
        raise HflowError(Diagnostic("HF404", message))
    return group


def _start_actors(group: PlacementGroup, size: int, platform: str, threads: int, local: bool) -> list[Any]:
    """One actor per bundle, ranks grouped by node."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    bundles = sorted(range(size), key=lambda bundle: (nodes[bundle], bundle))
    env = {"OMP_NUM_THREADS": str(threads)} | ({"GLOO_SOCKET_IFNAME": "lo"} if local else {})
    actor_class: Any = ray.remote(concurrency_groups={"control": 1})(_RayWorker)  # pyright: ignore
    actors = [
        actor_class.options(
            num_cpus=1,
            num_gpus=1 if platform == "cuda" else 0,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": env},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote(platform, threads, str(Path.cwd()))
        for bundle in bundles
    ]
    try:
        ray.get([actor.ready.remote() for actor in actors], timeout=START_WAIT_S)
    except RayError as error:
        raise HflowError(Diagnostic("HF404", f"workers do not start: {error}")) from None
    return actors


def _end(processes: list[psutil.Process]) -> None:
    """Ray's own processes normally end with it; what is left after a moment is ended by pid."""
    _, alive = psutil.wait_procs(processes, timeout=3)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=3)
