"""The worker as a Ray actor."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import psutil
import ray

from hflow.plan.engine_registry import DEFAULT_ENGINE
from hflow.runtime.engines.implementation import implementation
from hflow.runtime.engines.shared_memory import remove_own
from hflow.runtime.network import INTERFACE, interface_of, network_stack, source_address
from hflow.runtime.owned_folder import OwnedFolder
from hflow.runtime.rendezvous import join_store
from hflow.runtime.samples.parts import SampleRequest
from hflow.runtime.worker.failure import failure_of
from hflow.runtime.worker.stacks import dump_on_signal, stacks
from hflow.runtime.worker.whereabouts import Whereabouts
from hflow.runtime.worker.worker import Report, Worker
from hflow.runtime.worker.world import Aborted

LOOPBACK = "127.0.0.1"
KIND = "worker"  # of the folder for temporary files: Ray ends workers without letting them clean up


class RayWorker(Worker):
    """Calls run one after another in one thread, those of the group `control` in another."""

    def __init__(self, device: str, folder: str):
        if Path(folder).is_dir():
            os.chdir(folder)  # paths in a graph are relative to where hflow was started
        self._gave_up = False
        self._dump = dump_on_signal()
        self._folder = OwnedFolder(KIND)
        self._folder.take_temporary_files()  # before the engine's imports, which make some
        implementation(DEFAULT_ENGINE)  # nearly every plan has it; an import now is not counted as a step's
        gc.collect()
        gc.freeze()  # what was imported lives on: to look for garbage in it took 3 % of a step
        super().__init__(device, isolates=True)

    def join_at(self, host: str, port: int, generation: int, rank: int, size: int, secret: bytes) -> Report:
        """Join the world whose store listens at `host`, by the interface that leads there."""
        if interface := interface_of(source_address(host)):
            os.environ.setdefault(INTERFACE, interface)
            if host == LOOPBACK:  # between hosts, NCCL finds the fastest by itself
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        self._gave_up = False
        return self.join(join_store(host, port), generation, rank, size, secret)

    def run(
        self, step: int, evaluation: bool = False, name: str = "", samples: SampleRequest | None = None
    ) -> Report:
        """Refused after a failure: the controller sends a step before it knows that the last one failed."""
        if self._gave_up:
            return {"error": failure_of(Aborted(), "", lambda _: None)}
        report = super().run(step, evaluation, name, samples)
        self._gave_up |= "error" in report
        return report

    def ready(self) -> tuple[int, float, int]:
        """Its process: see `WorkerProcess`."""
        return os.getpid(), psutil.Process().create_time(), self._dump

    def network_stack(self) -> Report:
        return {"stack": network_stack()}

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        self._gave_up = True
        super().abort()

    @ray.method(concurrency_group="control")
    def last_act(self) -> None:
        """The controller kills this process next."""
        self.end_servers()
        remove_own()
        self._folder.remove()

    @ray.method(concurrency_group="control")
    def whereabouts(self) -> Whereabouts:
        return super().whereabouts()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        return stacks() + self.function_stack()

    @ray.method(concurrency_group="control")
    def where(self) -> str:
        return super().where()
