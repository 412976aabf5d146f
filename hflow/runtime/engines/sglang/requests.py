"""Rows sent to a server to be continued, and what becomes of them when it dies or hangs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from hflow.runtime.engines.protocol import Stopped
from hflow.runtime.engines.sampler import Sampling
from hflow.runtime.engines.sglang.server import Server, ServerError

ROWS_PER_REQUEST = 16  # that come back together: the death of a server costs no rows that are done
CONNECTIONS = 64
POLL_S = 1.0
STALL_S = 300.0  # without any answer, until the server is asked whether it is well
DEATH_S = 15.0  # the longest that a server takes to notice that a part of it died
LONGEST_S = 24 * 3600.0


class Lost(Exception):  # noqa: N818  (it is what happened)
    """The server died or hangs; another may answer the rest."""


@dataclass(frozen=True)
class RequestRow:
    """Token ids to be continued, with random numbers that belong to `seed`."""

    prompt: list[int]
    seed: int


@dataclass(frozen=True)
class Response:
    """Token ids, their log-probs, and the versions of the weights that sampled them."""

    tokens: list[int]
    log_probs: list[float]
    versions: list[str]


def ask(
    server: Server,
    rows: Sequence[RequestRow],
    sampling: Sampling,
    answered: MutableMapping[int, Response],
    paused: threading.Event,
    stopped: threading.Event,
) -> None:
    """Have `server` continue those `rows` that are not yet `answered`, and put its answers there, by row.

    Args:
        paused: set while it is not expected to answer.

    Raises:
        Lost: the server died or hangs; the answers so far are kept.
        ServerError: it refused a request.
        Stopped: `stopped` was set meanwhile. After any of these, `server` is closed.
    """
    left = [number for number in range(len(rows)) if number not in answered]
    parts = [left[at : at + ROWS_PER_REQUEST] for at in range(0, len(left), ROWS_PER_REQUEST)]
    with ThreadPoolExecutor(max(1, min(CONNECTIONS, len(parts)))) as pool:
        waiting = {pool.submit(_post, server, [rows[i] for i in part], sampling): part for part in parts}
        try:
            _collect(server, waiting, answered, paused, stopped)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            server.close()  # which ends the requests that still wait for it
            raise


def _collect(
    server: Server,
    waiting: Mapping[Future[list[Response]], list[int]],
    answered: MutableMapping[int, Response],
    paused: threading.Event,
    stopped: threading.Event,
) -> None:
    pending, heard = set(waiting), time.monotonic()
    while pending:
        done, pending = wait(pending, POLL_S, FIRST_COMPLETED)
        for future in done:
            answered.update(zip(waiting[future], _result(server, future)))
            heard = time.monotonic()
        if stopped.is_set():
            raise Stopped
        if pending and not server.alive:
            raise Lost("it died")
        if paused.is_set():
            heard = time.monotonic()
        if time.monotonic() - heard > STALL_S:
            if not server.healthy():
                raise Lost(f"it gave no answer for {STALL_S:.0f} s")
            heard = time.monotonic()


def _result(server: Server, future: Future[list[Response]]) -> list[Response]:
    try:
        return future.result()
    except ServerError as error:
        if _dies(server):
            raise Lost(str(error)) from None
        raise


def _dies(server: Server) -> bool:
    """Whether it is dead within a short time: a part of it may have died before it has noticed."""
    until = time.monotonic() + DEATH_S
    while server.alive and time.monotonic() < until:
        if server.healthy():
            return False
        time.sleep(POLL_S)
    return True


def _post(server: Server, rows: Sequence[RequestRow], sampling: Sampling) -> list[Response]:
    body = {
        "input_ids": [row.prompt for row in rows],
        "sampling_params": [_params(row, sampling) for row in rows],
        "return_logprob": True,
    }
    return [_response(answer) for answer in server.post("/generate", body, LONGEST_S)]


def _params(row: RequestRow, sampling: Sampling) -> dict[str, Any]:
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "sampling_seed": row.seed,
        "stop_token_ids": [sampling.eos_id],
    }


def _response(answer: Mapping[str, Any]) -> Response:
    meta = answer["meta_info"]
    log_probs = [_number(told[0]) for told in meta["output_token_logprobs"]]
    tokens, reason = answer["output_ids"], (meta["finish_reason"] or {}).get("type")
    if reason not in ("stop", "length") or len(log_probs) != len(tokens):
        raise ServerError(f"a row ended by `{reason}` with {len(tokens)} tokens, {len(log_probs)} log-probs")
    versions = list(_versions(meta, len(tokens)))
    if len(versions) != len(tokens):
        raise ServerError(f"a row has {len(tokens)} tokens and versions of {len(versions)}")
    return Response(tokens, log_probs, versions)


def _number(told: float | None) -> float:
    """JSON has no NaN: SGLang answers null."""
    return math.nan if told is None else float(told)


def _versions(meta: Mapping[str, Any], tokens: int) -> Iterator[str]:
    """A response that was under way when the weights changed tells of which version its tokens are."""
    whole = [{"version": meta["weight_version"], "start": 0, "end": tokens}]
    for span in meta.get("weight_versions") or whole:
        yield from [str(span["version"])] * (span["end"] - span["start"])
