"""One SGLang server, as the ranks of a tensor-parallel group share it: the first of them speaks to it. Where
they are on several hosts, the first on each host starts its part."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.runtime.engines.gather_json import broadcast_json, gather_json
from hflow.runtime.engines.protocol import NodeError, Stopped
from hflow.runtime.engines.sampler import Sampling
from hflow.runtime.engines.sglang.hosts import ServerHosts
from hflow.runtime.engines.sglang.meeting import Meeting
from hflow.runtime.engines.sglang.options import ServerOptions
from hflow.runtime.engines.sglang.requests import Lost, RequestRow, Response, ask
from hflow.runtime.engines.sglang.room import free_bytes, make_room
from hflow.runtime.engines.sglang.server import Server, ServerError
from hflow.runtime.engines.sglang.share import handle
from hflow.runtime.engines.sglang.tiles import LOADER
from hflow.runtime.engines.sglang.weights import ServedWeights
from hflow.runtime.network import INTERFACE, network_stack, own_address
from hflow.units import size

RESTARTS = 3  # while one node runs
UPDATE_S = 600.0

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class Asked:
    """Rows that a server continues; `answered` by number so far. `ending`, of the speaker: what happened to
    the server, or None when all are answered. `end_s`: when that was, in seconds since the epoch."""

    rows: Sequence[RequestRow]
    sampling: Sampling
    answered: dict[int, Response] = field(default_factory=dict[int, Response])
    ending: Future[str | None] = field(default_factory=Future["str | None"])
    end_s: float = 0.0

    def attempt(self, server: Server, paused: threading.Event, stopped: threading.Event) -> None:
        """For a thread of its own, which does not keep the process alive."""
        try:
            ask(server, self.rows, self.sampling, self.answered, paused, stopped)
            self.end_s = time.time()
            self.ending.set_result(None)
        except Lost as lost:
            self.ending.set_result(str(lost))
        except BaseException as error:
            self.ending.set_exception(error)


class Replica:
    """All methods but `ask` and `close` are collective over the group. What a server refuses, all ranks
    raise; another failure of the speaker is its own, and ends the others' wait by ending the run."""

    def __init__(
        self,
        node: str,
        device: torch.device,
        visible: str,
        options: Callable[[tuple[str, ...], ServerHosts], ServerOptions],
        group: ProcessGroup,
        stopped: threading.Event,
        told: Callable[[str], None],
    ):
        """Start the server.

        Args:
            node: in whose name errors are raised.
            device: of this rank.
            visible: its entry of CUDA_VISIBLE_DEVICES; empty on a CPU.
            options: given the devices of the ranks on this host, and the hosts.
            stopped: set when nobody waits for answers any more.
            told: hears what is done while it takes long.

        Raises:
            NodeError: HF404 when the server does not start.
        """
        self.node, self.group, self.stopped, self.told = node, group, stopped, told
        self.speaks = group.rank() == 0
        self.device = device
        stacks = self._gathered(network_stack())
        here = [stack == stacks[group.rank()] for stack in stacks]
        self.starts = here.index(True) == group.rank()
        try:
            hosts = ServerHosts.of(stacks, group.rank())
        except ValueError as error:
            raise NodeError(node, f"SGLang: {error}", "HF404") from None
        devices = tuple(told for told, is_here in zip(self._gathered(visible), here) if told and is_here)
        self.options = options(devices, hosts)
        self.holds: ServedWeights | None = None  # see `weights.Taker`
        self._server: Server | None = None  # of the ranks that start one
        self._asked: list[Asked] = []  # and not yet answered
        self._paused = threading.Event()
        self._died = False  # in the middle of a renewal
        self._start()

    def ask(self, rows: Sequence[RequestRow], sampling: Sampling) -> Asked:
        """Begin to continue `rows` (of which the speaker's count). Weights that come meanwhile serve the rest
        of every response. Not collective."""
        asked = Asked(rows, sampling)
        self._asked.append(asked)
        self._send(asked)
        return asked

    def answers(self, asked: Asked, restore: Callable[[], None]) -> list[Response]:
        """Responses to the rows that were asked about, in their order.

        Args:
            restore: gives a server that had to be started again its weights; collective over the group.

        Raises:
            NodeError: HF404 when one server after the other dies; HF401 when a request is refused.
        """
        for attempt in range(RESTARTS + 1):
            lost = self._together(asked.ending.result, "HF401")
            if lost is None:
                self._asked.remove(asked)
                answered = [vars(asked.answered[number]) for number in range(len(asked.answered))]
                asked.end_s, *told = self._told([asked.end_s, *answered])
                return [Response(**one) for one in told]
            if self.speaks:
                done = f"{len(asked.answered)} of {len(asked.rows)} rows are done"
                _LOG.warning("%s: SGLang was lost (%s); %s; starting it again", self.node, lost, done)
            if attempt < RESTARTS:
                if self.revive():  # unless new weights have found it dead before
                    restore()
                self._send(asked)
        raise NodeError(self.node, f"SGLang was lost {RESTARTS + 1} times", "HF404")

    def revive(self) -> bool:
        """Start the server again if it has died since it was asked last. Returns whether it had."""
        self._died = False
        alive = self._together(lambda: self._server is not None and self._server.alive, "HF404")
        if not alive:
            self._start()
        return not alive

    def begin(self) -> None:
        """What is under way gives its place in the KV cache up, which knows the weights before, and goes on
        from its tokens."""
        if self._asked:
            self._paused.set()
            self._update("/pause_generation", {"mode": "retract"})
        self._update("/begin_weight_update", {})

    def take(self, header: str, flat: Tensor, version: str) -> None:
        """`weights.Taker`: what this rank of the server shall hold; `version`: with the last bucket."""
        handles = self._gathered(handle(header, flat))
        body: dict[str, Any] = {
            "serialized_named_tensors": handles,
            "load_format": LOADER,
            "flush_cache": bool(version),
        }
        self._update("/update_weights_from_tensor", body | ({"weight_version": version} if version else {}))

    def end(self) -> None:
        self._update("/end_weight_update", {})
        if self._asked:
            self._update("/continue_generation", {})
        self._paused.clear()

    def sleep(self) -> None:
        """One that has died needs none: the next renewal finds it."""
        if self.options.sleeps and self._together(lambda: bool(self._server and self._server.alive), "HF404"):
            self._update("/release_memory_occupation", {})

    def wake(self) -> None:
        if self.options.sleeps:
            self._update("/resume_memory_occupation", {})

    def close(self) -> None:
        """Not collective."""
        if self._server:
            self._server.close()
            self._server = None

    def _start(self) -> None:
        """Every rank gives back first what it has cached: its server starts on its device.

        Raises:
            NodeError: HF404 when it does not start.
        """
        self.close()
        self.holds = None
        make_room(self.device)
        free = min(int(told) for told in self._gathered(str(free_bytes(self.device))))
        needs = self.options.reserve_bytes
        if self.options.devices and needs >= free:
            problem = f"SGLang computes with {size(needs)} beside weights and KV cache; {size(free)} are free"
            raise NodeError(self.node, problem, "HF404")
        self.options = replace(self.options, free_bytes=free)
        meeting = self._meet() if self.options.hosts.count > 1 else None
        problem = self._start_here(meeting) if self.starts else ""
        if problems := [*filter(None, self._gathered(problem))]:
            self.close()
            raise NodeError(self.node, f"SGLang: {problems[0]}", "HF404")

    def _meet(self) -> Meeting | None:
        """With the other hosts; None on ranks that start nothing.

        Raises:
            NodeError: HF404: one host does not reach another.
        """
        opened: list[Meeting] = []

        def opens() -> str:
            try:
                opened.append(Meeting.open(own_address(os.environ.get(INTERFACE, "lo"))))
            except OSError as error:
                raise ServerError(f"its hosts cannot meet: {error}") from None
            return opened[0].place

        place = self._together(opens, "HF404")
        self.options = replace(self.options, hosts=replace(self.options.hosts, store=place))
        if opened or not self.starts:
            return opened[0] if opened else None
        try:
            return Meeting.join(place)
        except RuntimeError as error:
            raise NodeError(self.node, f"SGLang: its first host is not reached: {error}", "HF404") from None

    def _start_here(self, meeting: Meeting | None) -> str:
        """Returns why the server did not start; empty if it did.

        Raises:
            Stopped: nobody waits for the server any more.
        """

        def told(text: str) -> None:
            if self.stopped.is_set():
                raise Stopped
            self.told(f"{self.node}: {text}")

        try:
            self._server = Server.start(self.options, told, meeting)
        except BaseException as error:
            if meeting:
                meeting.fail(str(error) or type(error).__name__)
            if isinstance(error, ServerError):
                return str(error)
            raise
        finally:
            self.told("")
        return ""

    def _send(self, asked: Asked) -> None:
        if self.speaks:
            asked.ending = Future()
            arguments = self._server, self._paused, self.stopped
            threading.Thread(target=asked.attempt, args=arguments, daemon=True).start()

    def _update(self, path: str, body: dict[str, Any]) -> None:
        """With a server that dies meanwhile, nothing more: whoever asks the next one gives it the weights.

        Raises:
            NodeError: HF410: what the server serves now is not what it should.
        """

        def post() -> bool:
            assert self._server
            try:
                answer = self._server.post(path, body, UPDATE_S)
            except ServerError:
                if self._server.alive:
                    raise
                return True
            if isinstance(answer, dict) and answer.get("success") is False:
                raise ServerError(f"{path}: {answer.get('message')}")
            return False

        if not self._died:
            self._died = self._together(post, "HF410")

    def _together(self, action: Callable[[], T], code: str) -> T:
        """What `action` gives to the speaker."""
        outcome: list[Any] = [None, ""]
        if self.speaks:
            try:
                outcome[0] = action()
            except ServerError as error:
                outcome[1] = str(error)
        result, problem = self._told(outcome)
        if problem:
            raise NodeError(self.node, f"SGLang: {problem}", code)
        return result

    def _told(self, value: list[Any]) -> list[Any]:
        """The speaker's list, on all ranks."""
        return broadcast_json(value, self.group) if self.group.size() > 1 else value

    def _gathered(self, value: str) -> list[str]:
        """The values of all ranks."""
        return [str(told) for told in gather_json(value, self.group)] if self.group.size() > 1 else [value]
