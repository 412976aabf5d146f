"""Rows sent to a server to be continued, and what becomes of them when it dies or hangs."""

from __future__ import annotations

import json
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
IMPOSSIBLE = -1e30  # less than any log-prob; SGLang tells minus infinity as the least float32
# A reference to the class that the server loads, as a pickle has it. The module is hflow's, the server this
# worker's own.
_TRUNCATE = b"chflow.runtime.engines.sglang.truncate\nTruncate\n."


class Lost(Exception):  # noqa: N818  (it is what happened)
    """The server died or hangs; another may answer the rest."""


@dataclass(frozen=True)
class RequestRow:
    """Token ids to be continued, with random numbers that belong to `seed`."""

    prompt: list[int]
    seed: int


@dataclass(frozen=True)
class Response:
    """Token ids, their log-probs, and the versions of the weights that sampled them. `kept`: where sets were
    asked for, that of each token, at most one id larger than was asked for. `routes`: where they were asked
    for, as SGLang tells them (`routes.served_routes`), of these tokens and perhaps more."""

    tokens: list[int]
    log_probs: list[float]
    versions: list[str]
    kept: list[list[int]] | None = None
    routes: str | None = None

    def first(self, tokens: int) -> Response:
        """Cut after so many tokens."""
        kept = None if self.kept is None else self.kept[:tokens]
        first = self.tokens[:tokens], self.log_probs[:tokens], self.versions[:tokens]
        return Response(*first, kept, self.routes)


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
    body: dict[str, Any] = {
        "input_ids": [row.prompt for row in rows],
        "sampling_params": [_params(row, sampling) for row in rows],
        "return_logprob": True,
    }
    if sampling.truncation:
        body["custom_logit_processor"] = json.dumps({"callable": _TRUNCATE.hex()})
    if sampling.max_kept is not None:
        body["top_logprobs_num"] = sampling.max_kept + 1
    if sampling.routes:
        body["return_routed_experts"] = True
    return [_response(answer, sampling) for answer in server.post("/generate", body, LONGEST_S)]


def _params(row: RequestRow, sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "sampling_seed": row.seed,
        "stop_token_ids": [sampling.ends.eos_id, *sorted(sampling.ends.token_ids)],
    }
    if sampling.ends.texts:
        params |= {"stop": list(sampling.ends.texts), "no_stop_trim": True}
        # Which of the tokenizer's special tokens are written is hflow's own choice (`Tokenizer.decode`).
        params["skip_special_tokens"] = False
    if sampling.truncation:
        params["custom_params"] = {"temperature": sampling.temperature, **vars(sampling.truncation)}
    return params


def _response(answer: Mapping[str, Any], sampling: Sampling) -> Response:
    meta = answer["meta_info"]
    log_probs = [_number(told[0]) for told in meta["output_token_logprobs"]]
    tokens, reason = answer["output_ids"], (meta["finish_reason"] or {}).get("type")
    if reason not in ("stop", "length") or len(log_probs) != len(tokens):
        raise ServerError(f"a row ended by `{reason}` with {len(tokens)} tokens, {len(log_probs)} log-probs")
    versions = list(_versions(meta, len(tokens)))
    if len(versions) != len(tokens):
        raise ServerError(f"a row has {len(tokens)} tokens and versions of {len(versions)}")
    kept = None
    if sampling.max_kept is not None:
        kept = [_likely(tops) for tops in meta["output_top_logprobs"]]
        if len(kept) != len(tokens):
            raise ServerError(f"a row has {len(tokens)} tokens and kept sets of {len(kept)}")
    routes = meta["routed_experts"] if sampling.routes else None
    return Response(tokens, log_probs, versions, kept, routes)


def _likely(tops: Sequence[Sequence[Any]]) -> list[int]:
    """The ids that truncation has left among the most likely ones, each told as [log-prob, id, text]."""
    return sorted(int(told[1]) for told in tops if told[0] is not None and told[0] > IMPOSSIBLE)


def _number(told: float | None) -> float:
    """JSON has no NaN: SGLang answers null."""
    return math.nan if told is None else float(told)


def _versions(meta: Mapping[str, Any], tokens: int) -> Iterator[str]:
    """A response that was under way when the weights changed tells of which version its tokens are."""
    whole = [{"version": meta["weight_version"], "start": 0, "end": tokens}]
    for span in meta.get("weight_versions") or whole:
        yield from [str(span["version"])] * (span["end"] - span["start"])
