"""The Ray actors of one placement, from their start to their end. Import this module after `local_ray` has
set Ray's environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hflow.diagnostics import Diagnostic, HflowError
from hflow.runtime.controller.placement import Demand, node_names
from hflow.runtime.controller.worker_failure import WorkerFailure
from hflow.runtime.controller.worker_process import END_S as KILL_S
from hflow.runtime.controller.worker_process import WorkerProcess
from hflow.runtime.gpus import HIDDEN
from hflow.units import plural

START_WAIT_S = 1800  # to import torch and an engine, with cold disks, on cores that others use
TELL_S = 60  # from one word to the next meanwhile
START_PAUSE_S = 2  # between two checks meanwhile
END_S = 15  # for the servers of engines to end
GRACE_S = 10  # for survivors to give up after a failure


class RayWorkers:
    """`actors`, their `processes`, and the names of their `nodes`, by rank. `deaf`: the ranks that answer
    nothing more."""

    def __init__(
        self,
        group: PlacementGroup,
        demand: Demand,
        worker: type[Any],
        joined: bool,
        check: Callable[[], None],
        say: Callable[[str], None],
    ):
        """Start them.

        Args:
            worker: what runs in their processes.
            joined: whether Ray was there before.
            check: is called now and then meanwhile, and raises when there is nothing to wait for.
            say: tells the user what is waited for.

        Raises:
            HflowError: HF404 when they do not start.
            WorkerFailure: HF402 when one dies meanwhile; then the others have been ended.
        """
        self._group = group
        names = node_names(group)
        self.nodes = [name for name, workers in zip(names, demand.hosts) for _ in range(workers)]
        self.deaf: frozenset[int] = frozenset()
        self.actors, started = _start_actors(worker, group, demand, joined, check, say)
        self.processes = [
            WorkerProcess(*process, name.rpartition("/")[2], not joined)
            for process, name in zip(started, self.nodes)
        ]

    @property
    def addresses(self) -> list[str]:
        """Of the host of each."""
        return [name.partition("/")[0] for name in self.nodes]

    def abort(self, size: int) -> None:
        """Tell the first `size` to give up."""
        listening = (actor for rank, actor in enumerate(self.actors[:size]) if rank not in self.deaf)
        told = [actor.abort.remote().future() for actor in listening]
        wait(told, GRACE_S)  # so that none comes after the next start

    def end(self, without_ray: bool) -> None:
        """End them, and give their devices back. `without_ray`: it has died, and takes no requests."""
        # killed workers end their servers too, but leave their folders
        ends = {r: a.last_act.remote().future() for r, a in enumerate(self.actors) if r not in self.deaf}
        wait(ends.values(), END_S)
        for actor in self.actors if not without_ray else ():
            ray.kill(actor)
        # Ray asks them to end; one that hears nothing would live on, and hold its memory
        deaf = [p for r, p in enumerate(self.processes) if r not in ends or not ends[r].done()]
        wait([process.end() for process in (self.processes if without_ray else deaf)], 2 * KILL_S)
        if not without_ray:
            remove_placement_group(self._group)


def _start_actors(
    worker: type[Any],
    group: PlacementGroup,
    demand: Demand,
    joined: bool,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> tuple[list[Any], list[tuple[int, float, int]]]:
    """One actor for each rank, those of a host in its bundle, and their processes (`RayWorker.ready`).
    `joined`: the Ray was there before."""
    actor_class: Any = ray.remote(concurrency_groups={"control": 1})(worker)  # pyright: ignore
    options: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 1 if demand.platform == "cuda" else 0,
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    # Ray leaves workers without a GPU all that their node sees. Our own sees none; in a cluster each worker
    # is started anew for it, which takes seconds.
    if joined and demand.platform == "cpu":
        options["runtime_env"] = {"env_vars": HIDDEN}
    bundles = [bundle for bundle, workers in enumerate(demand.hosts) for _ in range(workers)]
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=b) for b in bundles]
    folder = str(Path.cwd())
    actors = [
        actor_class.options(**options, scheduling_strategy=place).remote(demand.platform, folder)
        for place in places
    ]
    starts = [actor.ready.remote().future() for actor in actors]
    try:
        _await(starts, check, say)
    except RayActorError as error:
        remove_placement_group(group)  # which ends the others, too
        reason = str(error).strip().partition("\n")[0]
        raise WorkerFailure(Diagnostic("HF402", f"a worker died while it started: {reason}")) from None
    except RayError as error:
        raise HflowError(Diagnostic("HF404", f"workers do not start: {error}")) from None
    return actors, [ready.result() for ready in starts]


def _await(starts: list[Future[Any]], check: Callable[[], None], say: Callable[[str], None]) -> None:
    """Raises what a start has, or HflowError HF404 after too long."""
    began, told_s = time.monotonic(), 0.0
    while (waited_s := time.monotonic() - began) < START_WAIT_S:
        done, waiting = wait(starts, START_PAUSE_S, FIRST_EXCEPTION)
        for ready in done:
            ready.result()
        if not waiting:
            return
        check()
        if waited_s - told_s > TELL_S:
            told_s = waited_s
            missing = f"{len(waiting)} of {plural(len(starts), 'worker')}"
            say(f"waiting for {missing} to start ({waited_s:.0f} of {START_WAIT_S} s)")
    raise HflowError(Diagnostic("HF404", f"workers do not start within {START_WAIT_S} s"))
