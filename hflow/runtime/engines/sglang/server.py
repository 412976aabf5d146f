"""A worker's side of an SGLang server: start it, ask it, end it.

The server's sockets are on loopback, and it ends with the process that started it. Of a server over several
hosts this is the program of one: the worker on the first host asks, and programs end together.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.runtime.engines.sglang import serve
from hflow.runtime.engines.sglang.log import cause, last_lines
from hflow.runtime.engines.sglang.options import ServerOptions
from hflow.runtime.engines.sglang.shared_memory import remove_of
from hflow.runtime.engines.sglang.tree import Tree
from hflow.runtime.owned_folder import OwnedFolder

if TYPE_CHECKING:  # it imports torch, before which a server's program sets the environment
    from hflow.runtime.engines.sglang.meeting import Meeting

START_S = 1800.0  # to load a model, which may lie on a slow disk
ANSWER_S = 600.0  # to a request
HEALTH_S = serve.HEALTH_S + 30.0
READY_S = 30.0  # to the question whether it has started, which is asked again
NOTICE_S = 3.0  # until a broken server is known to be dead
WATCH_S = 0.5  # between two looks at the other hosts


class ServerError(Exception):
    """SGLang refused something, or died; the message says which, in SGLang's words."""


def _nobody(_message: str) -> None:
    pass


class Server:
    """A running server. Any thread may ask it; several may at once. `meeting`: with the other hosts of one
    over several."""

    def __init__(self, options: ServerOptions, meeting: Meeting | None = None) -> None:
        """Begin to start it; `start` waits until it is there."""
        self._closing, self._closed = threading.Lock(), threading.Event()
        self._meeting, self._is_first = meeting, options.hosts.number == 0
        self._folder = OwnedFolder("sglang", forget=remove_of)
        self._log = self._folder.path / "log"
        self._port = _reserve()
        self._tree: Tree | None = None
        self.port: int = self._port.getsockname()[1]
        atexit.register(self.close)
        key = secrets.token_hex(32)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = serve.Request(options, self.port, key, os.getpid(), str(self._folder.path))
        command = [sys.executable, "-m", serve.__name__]
        try:
            self._tree = Tree(command, request.to_json(), _environment(options, self._folder.path), self._log)
        except OSError:
            self.close()
            raise

    @classmethod
    def start(
        cls,
        options: ServerOptions,
        told: Callable[[str], None] = _nobody,
        meeting: Meeting | None = None,
    ) -> Server:
        """A server that takes requests. `told` is called about once a second, with how long it has taken.

        Raises:
            ServerError: it did not start; with the cause and the end of its log. Nothing is left of it.
        """
        try:
            server = cls(options, meeting)
        except OSError as error:
            raise ServerError(f"SGLang cannot be started: {error}") from None
        try:
            server._wait(told)
            server._check(options)
        except BaseException:
            server.close()
            raise
        if meeting:
            if server._is_first:
                meeting.tell_started()
            threading.Thread(target=server._watch, args=(meeting,), daemon=True).start()
        return server

    def _wait(self, told: Callable[[str], None]) -> None:
        begin = time.monotonic()
        while (taken := time.monotonic() - begin) < START_S:
            told(f"starting SGLang ({taken:.0f} s)")
            if not self._is_whole:
                raise ServerError(self._death("SGLang ended while it started"))
            if failure := self._failure():
                raise ServerError(failure)
            if self._is_ready():
                return
            time.sleep(1.0)
        raise ServerError(self._death(f"SGLang did not start within {START_S:.0f} s"))

    def _is_ready(self) -> bool:
        if self._meeting and not self._is_first:
            return self._meeting.has_started
        try:
            return self._send("GET", "/ready", None, READY_S)[0] == 200
        except (OSError, HTTPException):
            return False

    def _check(self, options: ServerOptions) -> None:
        """That SGLang has not made anything smaller than it was told to."""
        assert self._tree is not None
        self._tree.need_children()
        if not self._is_first:
            return
        tokens = self.get("/server_info")["max_total_num_tokens"]
        if tokens < options.max_tokens:
            raise ServerError(
                f"memory suffices for a KV cache of {tokens} tokens, not of {options.max_tokens}"
            )

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = ANSWER_S) -> Any:
        """SGLang's answer, from JSON; None or a text where it answers nothing or a text.

        Raises:
            ServerError: it refused, it died, or there was no answer in time.
        """
        return self._ask("POST", path, json.dumps(body or {}), timeout_s)

    def get(self, path: str, timeout_s: float = ANSWER_S) -> Any:
        """As `post`."""
        return self._ask("GET", path, None, timeout_s)

    def _ask(self, method: str, path: str, body: str | None, timeout_s: float) -> Any:
        try:
            status, answer = self._send(method, path, body, timeout_s)
        except TimeoutError:
            raise ServerError(f"{path}: no answer within {timeout_s:.0f} s") from None
        except (OSError, HTTPException) as error:
            raise ServerError(self._broken(path, error)) from None
        if status != 200:
            raise ServerError(f"{path}: {_said(answer)} (HTTP {status})")
        return _parsed(answer)

    def _send(self, method: str, path: str, body: str | None, timeout_s: float) -> tuple[int, str]:
        """Never through a proxy: unlike other clients, this one does not know of them."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _broken(self, path: str, error: Exception) -> str:
        """Why. A connection breaks a moment before the process that broke it has ended."""
        if self._tree is None:
            return f"{path}: {self._failure() or 'the server is closed'}"
        deadline = time.monotonic() + NOTICE_S
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.alive:
            return f"{path}: {error or type(error).__name__}"
        return self._death(f"{path}: SGLang died")

    def _death(self, message: str) -> str:
        if not self._log.exists():
            return message
        why, lines = cause(self._log), last_lines(self._log)
        head = f"{message}: {why}" if why else message
        return f"{head}\nThe end of its log:\n{lines}" if lines else head

    @property
    def alive(self) -> bool:
        """Whether the server and all processes that it had when it was ready live, here and elsewhere."""
        return self._is_whole and not self._failure()

    @property
    def _is_whole(self) -> bool:
        tree = self._tree
        return tree is not None and tree.whole

    def _failure(self) -> str:
        """What the other hosts have told; empty if nothing."""
        return self._meeting.failure() if self._meeting else ""

    def _watch(self, meeting: Meeting) -> None:
        """For a thread of its own: programs of several hosts end together."""
        while not self._closed.wait(WATCH_S):
            if meeting.failure():
                self.close()
            elif not self._is_whole and not self._closed.is_set():
                meeting.fail(self._death("SGLang died"))

    def healthy(self) -> bool:
        """Whether it lives and generates: when idle, SGLang makes a token for this. Not while paused."""
        try:
            return self.alive and self.get("/health_generate", HEALTH_S) is None
        except ServerError:
            return False

    def close(self) -> None:
        """End all its processes, wait for them, and remove its files. Twice is once."""
        self._closed.set()
        with self._closing:
            tree, self._tree = self._tree, None
            if tree is not None:
                tree.end()
            self._port.close()
            self._folder.remove()
        atexit.unregister(self.close)


def _reserve() -> socket.socket:
    """A free port on loopback, kept from other programs: while this socket is open and does not listen, only
    one that sets SO_REUSEADDR as well can listen there, as the server does."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _environment(options: ServerOptions, folder: Path) -> dict[str, str]:
    """This process's own, with the server's devices, and with its temporary files in `folder`."""
    sources = str(Path(__file__).parents[4])  # the folder of the package
    path = [sources, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(options.devices),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
        "NO_PROXY": "*",
        "no_proxy": "*",
    }


def _said(answer: str) -> str:
    """The message in SGLang's answer to what it refuses, which has several forms."""
    said = _parsed(answer)
    while isinstance(said, dict):
        said = next((said[key] for key in ("error", "message", "detail") if key in said), str(said))
    return str(said or "refused")


def _parsed(answer: str) -> Any:
    if not answer:
        return None
    try:
        return json.loads(answer)
    except ValueError:
        return answer
