"""A pool of workers as Ray actors: Ray starts, places and buries processes; everything else is ours.

One call per worker and step is all that passes through Ray; values travel between workers over
torch.distributed. Import this module after `local_ray` has set Ray's environment.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from hflow.diagnostics import Diagnostic, HflowError
from hflow.runtime.controller.addresses import check_addresses
from hflow.runtime.controller.local_ray import LocalRay
from hflow.runtime.controller.placement import Demand, packs, place, spreads
from hflow.runtime.controller.pool import WAIT_S, WorkerCall
from hflow.runtime.controller.questions import Questions
from hflow.runtime.controller.ray_session import RaySession
from hflow.runtime.controller.ray_worker import KIND, LOOPBACK, RayWorker
from hflow.runtime.controller.ray_workers import GRACE_S, RayWorkers
from hflow.runtime.controller.watch import Watch
from hflow.runtime.controller.worker_failure import WorkerFailure, WorkerReport, root_cause
from hflow.runtime.controller.worker_process import STOPPED
from hflow.runtime.gpus import gpus_hidden
from hflow.runtime.owned_folder import remove_abandoned
from hflow.runtime.rendezvous import open_store
from hflow.runtime.worker.failure import Failure

IN_FLIGHT = 2  # calls that each worker has at most: this one and the next
RAY_PAUSE_S = 5.0  # between two looks at our own Ray's processes

# Of one call on all workers, by rank. `ray.wait` and `ray.get` would lose signals: they break down
# (SystemError) when a handler raises meanwhile.
Results = list[Future[WorkerReport]]


class RayPool:
    def __init__(
        self,
        hosts: Sequence[int],
        ray_at: LocalRay | str,
        platform: str = "cpu",
        say: Callable[[str], None] = print,
        worker: type[Any] = RayWorker,
    ):
        """Start Ray, or join it at an address. Workers start with the first `form`: the pool exists before
        they are waited for, and `close` ends what has started by then.

        Args:
            hosts: how many workers each of the plan's hosts has, in order of ranks.
            say: tells the user what is waited for.
            worker: what runs in the workers' processes.

        Raises:
            HflowError: HF404 when Ray cannot be started.
        """
        self._local = ray_at if isinstance(ray_at, LocalRay) else None
        self._ray_at = ray_at
        self._demand, self._worker, self._say = Demand(tuple(hosts), platform), worker, say
        self._workers: RayWorkers | None = None
        self._watch: Watch | None = None
        self._questions = Questions((), ())
        self._generation = 0
        self._is_renewed = False
        self._size = 0
        try:
            self._start_ray()
            self._store_address, self._store = _open_store(self._local is not None)
        except BaseException:
            self.close()
            raise

    def _start_ray(self) -> None:
        self._session = RaySession()
        with gpus_hidden() if self._demand.platform == "cpu" else nullcontext():
            self._session.start(sum(self._demand.hosts), self._ray_at)

    def form(self, size: int, wait_s: float = WAIT_S) -> list[str]:
        if size > sum(self._demand.hosts):
            message = f"the plan needs {size} workers; there are {sum(self._demand.hosts)}"
            raise HflowError(Diagnostic("HF404", message))
        if not self._workers:
            group = place(self._demand, self._say, wait_s, self._is_renewed)
            self._workers = RayWorkers(
                group, self._demand, self._worker, self._local is None, self._check_ray, self._say
            )
            if not self._local:
                self._check_addresses(self._workers)
        workers = self._workers.actors
        self._enter(len(workers))
        self._gather(deque([[a.leave.remote().future() for a in workers]]))
        self._enter(size)
        self._generation += 1
        host, port = self._store_address
        secret = secrets.token_bytes(32)
        joins = [
            actor.join_at.remote(host, port, self._generation, rank, size, secret).future()
            for rank, actor in enumerate(workers[:size])
        ]
        self._gather(deque([joins]))
        return self._workers.nodes[:size]

    def _check_addresses(self, workers: RayWorkers) -> None:
        calls = [actor.network_stack.remote().future() for actor in workers.actors]
        reports = [_report(call) for call in calls]  # of a dead one, `form` tells next
        addresses = [self._store_address[0], *workers.addresses]
        check_addresses(addresses, [report["stack"] for report in reports if "stack" in report])

    def watch(self, watch: Watch | None) -> None:
        self._watch = watch

    def call(self, method: str, *arguments: Any) -> list[WorkerReport]:
        return self._gather(deque([self._send(method, arguments)]))

    def stream(self, calls: Iterable[WorkerCall]) -> Iterator[list[WorkerReport]]:
        flight: deque[Results] = deque()
        sent: deque[WorkerCall] = deque()
        for call in calls:
            method, *arguments = call
            flight.append(self._send(method, arguments))
            sent.append(call)
            if len(flight) == IN_FLIGHT:
                yield self._learned(sent.popleft(), self._gather(flight))
        while flight:
            yield self._learned(sent.popleft(), self._gather(flight))

    def renew(self, hosts: Sequence[int]) -> None:
        self._demand, self._is_renewed = replace(self._demand, hosts=tuple(hosts)), True
        self._end_workers()
        if self._local and self._local.dead():
            self._end_ray(self._local)
            self._start_ray()

    def rooms(self) -> list[int]:
        return [self._demand.room(node["Resources"]) for node in ray.nodes() if node["Alive"]]

    def has_room(self, hosts: Sequence[int]) -> bool:
        demand = replace(self._demand, hosts=tuple(hosts))
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return spreads(demand, nodes) or packs(demand, nodes)

    def where(self) -> str:
        with suppress(RayError, TimeoutError):
            return self._called()[0].where.remote().future().result(0.5)
        return ""

    def close(self) -> None:
        """End workers and, if it is ours, Ray; leave no process and no temporary file."""
        if ray.is_initialized():
            self._end_workers()
        if self._local:
            self._end_ray(self._local)
            self._local.remove()
            remove_abandoned(KIND)  # of workers that were killed
        else:
            self._session.end()

    def _end_ray(self, local: LocalRay) -> None:
        """What is left of its processes after a moment is ended by pid."""
        processes = local.processes()
        self._session.end()
        _end(processes)

    def _end_workers(self) -> None:
        workers, self._workers = self._workers, None
        if workers:
            workers.end(bool(self._local and self._local.dead()))

    def _called(self) -> Sequence[Any]:
        assert self._workers
        return self._workers.actors[: self._size]

    def _send(self, method: str, arguments: Sequence[Any]) -> Results:
        shared = [ray.put(a) if method == "load" else a for a in arguments]
        return [getattr(a, method).remote(*shared).future() for a in self._called()]

    def _gather(self, flight: deque[Results]) -> list[WorkerReport]:
        """The reports of the oldest call in flight, which is taken out."""
        calls = flight.popleft()
        waiting = set(calls)
        while waiting:
            self._check_ray()
            pause_s = self._watch.pause_s if self._watch else RAY_PAUSE_S
            done, waiting = wait(waiting, pause_s, FIRST_COMPLETED)
            if any("error" in _report(call) for call in done):
                raise self._failure([calls, *flight])
            if waiting and self._watch and self._watch.is_due:
                self._look(self._watch, [calls, *flight])
        return [_report(call) for call in calls]

    def _check_ray(self) -> None:
        """Raises WorkerFailure HF402 when our own Ray has died. Its workers may go on for a while."""
        if self._local and (dead := self._local.dead()):
            raise WorkerFailure(Diagnostic("HF402", f"Ray's process has died: {', '.join(dead)}"))

    def _learned(self, call: WorkerCall, reports: list[WorkerReport]) -> list[WorkerReport]:
        if self._watch:
            self._watch.learn(call, reports)
        return reports

    def _enter(self, size: int) -> None:
        """The workers that are called from now on."""
        assert self._workers
        self._size, processes = size, self._workers.processes[:size]
        self._questions = Questions(self._called(), processes)
        if self._watch:
            there = zip(self._workers.addresses, processes)
            self._watch.enter([f"{address}, pid {process.pid}" for address, process in there])

    def _look(self, watch: Watch, flight: Sequence[Results]) -> None:
        """Raises WorkerFailure HF413 when workers hang; the others have been told to give up."""
        answers = self._questions.answers()
        watch.hear(answers)
        called = [not all(call.done() for call in calls) for calls in zip(*flight)]
        stall = watch.hanging(called, self._questions.stopped(watch.silent()))
        if stall is None:
            return
        assert self._workers
        stacks = self._questions.stacks()
        self._workers.deaf = deaf = frozenset(range(len(answers))) - stacks.keys()
        states = self._questions.states(deaf)
        dumps = self._questions.dumps({rank for rank, state in states.items() if state != STOPPED})
        failure = watch.failure(stall, stacks | dumps, states)
        self._workers.abort(self._size)
        raise failure

    def _failure(self, flight: Sequence[Results]) -> WorkerFailure:
        """Tell all to give up, and name the root cause. It may lie in a later call than where it was noticed:
        a worker that was ahead has died, and took the connections of the others with it."""
        assert self._workers
        self._workers.abort(self._size)
        calls = [call for calls in flight for call in calls]
        ended = wait(calls, GRACE_S).done
        of_ranks = [[_report(call) for call in calls if call in ended] for calls in zip(*flight)]
        addresses = [] if self._local else self._workers.addresses
        return root_cause([next((r for r in reports if "error" in r), {}) for reports in of_ranks], addresses)


def _report(call: Future[WorkerReport]) -> WorkerReport:
    """Of a call that has ended; a dead process becomes a failure."""
    try:
        return call.result()
    except RayActorError as error:
        text = str(error).strip().splitlines()
        return _dead(f"the worker process died: {text[-1] if text else error}")
    except RayError as error:
        return _dead(f"the worker cannot be reached: {error}")


def _dead(message: str) -> WorkerReport:
    return {"error": Failure(Diagnostic("HF402", message))}


def _open_store(local: bool) -> tuple[tuple[str, int], TCPStore]:
    """The rendezvous store of the workers, and where it listens."""
    host = LOOPBACK if local else ray.util.get_node_ip_address()
    port, store = open_store(host)
    return (host, port), store


def _end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=3)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=3)
