"""Ray in this process, started and shut down in a thread of its own: a signal that interrupted either would
leave processes that nobody knows. Import this module after `local_ray` has set Ray's environment."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from queue import SimpleQueue
from typing import Any

import ray

from hflow.diagnostics import Diagnostic, HflowError
from hflow.runtime.controller.local_ray import START_S, LocalRay

OBJECT_STORE_BYTES = 100 * 2**20  # programs and reports only
PRINTER = "print_to_stdstream"
NODE_OF = "get_node"
REGISTER_PAUSE_S, ALIVE_PAUSE_S = 0.2, 10.0  # between two looks whether a node is there, and whether it lives
# ray::RayLog::InstallFailureSignalHandler(char const*, bool)
HANDLER_INSTALLER = "_ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb"
# ray::RayLog::is_failure_signal_handler_installed_
HANDLER_INSTALLED = "_ZN3ray6RayLog36is_failure_signal_handler_installed_E"


class RaySession:
    """`start` and `end` Ray. In between its thread stays alive: the kernel ends Ray's processes with the
    thread that has started them."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="ray", daemon=True)
        self._thread.start()

    def start(self, workers: int, ray_at: LocalRay | str) -> None:
        """Start a Ray with room for so many workers, or join the one at an address. HF404 if that fails."""
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if isinstance(ray_at, LocalRay):
            options |= {
                "num_cpus": workers,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(ray_at.folder),
            }
        else:
            _check_reachable(ray_at)
            options["address"] = ray_at
        waiting = _waiting_for(ray_at) if isinstance(ray_at, LocalRay) else nullcontext()
        try:
            with waiting:
                self._call(lambda: ray.init(**options))
            _shorten_messages()
        except Exception as error:  # Ray raises just that when a process of its own dies meanwhile
            raise HflowError(Diagnostic("HF404", f"Ray cannot be reached or started: {error}")) from None

    def end(self) -> None:
        """Twice is once."""
        if not self._thread.is_alive():
            return
        self._call(_shut_down)
        self._jobs.put(None)
        self._thread.join()

    def _call(self, job: Callable[[], Any]) -> Any:
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(job())
            except BaseException as error:
                result.set_exception(error)

        self._jobs.put(run)
        return result.result()

    def _serve(self) -> None:
        while job := self._jobs.get():
            job()


@contextmanager
def _waiting_for(local: LocalRay) -> Iterator[None]:
    """Ray gives a node that it starts half a minute to register, and asks without a pause meanwhile. On cores
    that others use, its processes have not even started by then: while they live, they have `START_S`.
    Another version of Ray may not have the function."""
    services: Any = import_module("ray._private.services")
    asked = getattr(services, NODE_OF, None)
    if asked is None:
        yield
        return

    def registered(*given: Any, **options: Any) -> Any:
        began = looked = time.monotonic()
        while True:
            try:
                return asked(*given, **options)
            except RuntimeError:  # not yet
                now = time.monotonic()
                if now - looked > ALIVE_PAUSE_S:
                    looked = now
                    if now - began > START_S or local.dead():
                        raise
            time.sleep(REGISTER_PAUSE_S)

    setattr(services, NODE_OF, registered)
    try:
        yield
    finally:
        setattr(services, NODE_OF, asked)


def let_ray_take_its_signals() -> None:
    """Ray puts a handler in place that aborts the process at SIGTERM, once per process, half a second before
    its start returns. This has it do so now, so that the caller can take the signal back, and keep it."""
    with suppress(AttributeError):  # another version of Ray: the half second stays
        _library()[HANDLER_INSTALLER](None, ctypes.c_bool(False))


def _shut_down() -> None:
    """Ray's shutdown puts the default action in place of every handler that it has installed: a SIGTERM that
    came afterwards would kill the process before it has cleaned up. It is told that there is none."""
    _say_installed(False)
    ray.shutdown()
    _say_installed(True)  # the next start would install it again


def _say_installed(is_installed: bool) -> None:
    with suppress(ValueError):  # another version of Ray
        ctypes.c_bool.in_dll(_library(), HANDLER_INSTALLED).value = is_installed


def _library() -> ctypes.CDLL:
    path: Any = ray._raylet.__file__  # pyright: ignore[reportAttributeAccessIssue]
    return ctypes.CDLL(path)


def _shorten_messages() -> None:
    """Ray prints to standard output when a process of its own has died, some fifty lines of logs: the first
    sentence goes to standard error instead. Another version of Ray may not have the function."""

    def print_first(data: dict[str, Any], **_: Any) -> None:
        first = data["lines"][0].strip().partition(". ")[0]
        with suppress(OSError):
            print(f"Ray: {first}", file=sys.stderr)

    printing: Any = import_module("ray._private.worker")
    if hasattr(printing, PRINTER):
        setattr(printing, PRINTER, print_first)


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes before it says that nobody listens."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        return  # `auto`, or a form that Ray reads
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=10).close()
    except OSError as error:
        raise HflowError(Diagnostic("HF404", f"no Ray cluster answers at `{address}`: {error}")) from None
