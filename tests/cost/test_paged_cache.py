"""Room of a KV cache with pages: against closed forms, and servers that are simulated row by row."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import sqrt

import numpy as np
import numpy.typing as npt
import pytest

from hflow.cost.compute import node_time_s
from hflow.cost.execution import Execution
from hflow.cost.generation import decode_s, prefill_s
from hflow.cost.paged_cache import cache_tokens
from hflow.graph.lengths import Lengths
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.strategy import Strategy
from hflow.plan.workload import Workload
from hflow.runtime.engines.sglang.options import foresight

SHAPE, ONE, SGLANG = NAMED_SHAPES["llama-7b"], Mesh.of((0,)), Strategy(engine="sglang")
PROMPT, GREATEST = 96, 960
Floats = npt.NDArray[np.float64]
Z = 2.3263  # of the normal distribution, 99 % are below
LONG_TAIL = Lengths.of(GREATEST, 240, {})
SHORT_TAIL = Lengths.of(GREATEST, None, {"p0": 200, "p50": 500, "p95": 700})
OFTEN_CUT = Lengths.of(GREATEST, None, {"p50": 400, "p75": GREATEST})
SHORT_OR_GREATEST = Lengths.of(
    GREATEST, 0.75 * 240 + 0.25 * GREATEST, {"p0": 240, "p50": 240, "p75": GREATEST}
)


def work(rows: int, responses: Lengths | None, prompts: Lengths | None = None) -> Workload:
    return Workload(rows, PROMPT, GREATEST, prompts=prompts, responses=responses)


def room(given: Workload, rows: int) -> int:
    return cache_tokens(given, 1, rows, "sglang")


def test_rows_of_one_length_need_all_of_it() -> None:
    constant = Lengths(GREATEST, GREATEST)
    for rows, most in ((64, 64), (64, 16), (500, 8), (7, 3), (1, 1)):
        assert room(work(rows, constant), most) == most * (PROMPT + GREATEST)


def test_without_lengths_and_without_pages_rows_count_at_the_greatest() -> None:
    assert room(work(64, None), 16) == 16 * (PROMPT + GREATEST)
    for engine in ("megatron", "transformers"):
        assert cache_tokens(work(64, LONG_TAIL), 1, 16, engine) == 16 * (PROMPT + GREATEST)


def test_a_single_row_may_have_its_greatest_length() -> None:
    for lengths in (LONG_TAIL, SHORT_TAIL, SHORT_OR_GREATEST):
        assert room(work(64, lengths), 1) == PROMPT + GREATEST


@pytest.mark.parametrize("rows", [8, 64, 512])
def test_two_lengths_in_one_wave(rows: int) -> None:
    """All of the rows hold the shorter length, or a quarter of them the greatest."""
    others, long = rows - 1, PROMPT + GREATEST
    last = others * long / 4 + Z * sqrt(others * 3 / 16) * long
    expected = long + max(others * (PROMPT + 240), last)
    assert room(work(rows, SHORT_OR_GREATEST), rows) == pytest.approx(min(rows * long, expected), abs=2)


def test_ages_of_rows_that_are_refilled_for_long() -> None:
    """A row in flight has the age of renewal theory, whose density is the share of rows that are longer, over
    the mean (Cox, Renewal Theory, 1962). Of an exponential, it is distributed as the lengths. A part of the
    time is counted as its end."""
    part = GREATEST / 48
    lengths = Lengths.of(GREATEST, 100, {})
    at = np.arange(GREATEST) + 0.5
    survival = np.array([lengths.survival(float(t)) for t in at])
    age = (survival * at).sum() / survival.sum()
    deviation = sqrt((survival * at**2).sum() / survival.sum() - age**2)
    assert age == pytest.approx(100, rel=0.01) and deviation == pytest.approx(100, rel=0.03)
    for most in (65, 257):
        exact = PROMPT + GREATEST + (most - 1) * (PROMPT + age) + Z * sqrt(most - 1) * deviation
        found = room(work(100 * most, lengths), most)
        assert exact * 0.995 < found < exact + (most - 1) * part


def test_prompts_vary_by_group() -> None:
    """A group of four has one prompt, whose length deviates four times as much as one row's."""
    prompts = Lengths.of(PROMPT, None, {"p0": 0.0, "p100": PROMPT})  # uniform
    given = replace(work(64, None, prompts), alike=4)
    expected = PROMPT + GREATEST + 63 * (PROMPT / 2 + GREATEST) + Z * sqrt(63 * 4 * PROMPT**2 / 12)
    assert room(given, 64) == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("lengths", [LONG_TAIL, SHORT_TAIL, OFTEN_CUT, SHORT_OR_GREATEST], ids=str)
@pytest.mark.parametrize(("rows", "most"), [(128, 128), (300, 64), (900, 40)])
def test_the_pool_seldom_runs_over(lengths: Lengths, rows: int, most: int) -> None:
    """Of generations that are simulated without a limit, at most 2 % hold more than the pool at the time of
    the expected peak, and the pool is no larger than it must be for 99 of 100 at that time, by a row of the
    greatest length and a part of the time for each row."""
    held = np.array([tokens_held(drawn(lengths, rows, seed), most) for seed in range(200)])
    pool = room(work(rows, lengths), most)
    peak = int(held.mean(0).argmax())
    assert (held[:, peak] > pool).mean() <= 0.02
    slack = PROMPT + GREATEST + most * GREATEST / 48
    assert pool <= np.quantile(held, 0.99, axis=0).max() + slack + 0.02 * pool


def drawn(lengths: Lengths, rows: int, seed: int) -> list[int]:
    """Whole lengths, by inverting the survival function as a table."""
    ended = 1 - np.array([lengths.survival(float(t)) for t in range(GREATEST + 1)])
    ended[-1] = 1.0
    return np.maximum(1, np.searchsorted(ended, np.random.default_rng(seed).random(rows))).tolist()


def tokens_held(lengths: list[int], most: int, until: int = 4 * GREATEST) -> Floats:
    """Tokens in a cache without limit, step by step."""
    held = np.zeros(until)
    free = [0] * most
    for length in lengths:
        begin = min(free)
        free[free.index(begin)] = begin + length
        steps = np.arange(begin, min(until, begin + length))
        held[steps] += PROMPT + 1 + steps - begin
    return held


def served(lengths: list[int], most: int, pool: int, kept: float) -> tuple[list[tuple[int, int]], int]:
    """By SGLang's rules. A row begins while the pool has its greatest length free beside a share of what the
    running ones may still make: `kept` at first, nothing after 600 steps. Where the pool is full, the rows
    that have made least are retracted, and the share is what the others have made of their greatest lengths,
    and falls as before. Returns of each step the rows and the tokens that they hold, and the rows retracted.
    """
    waiting = deque((length, 0) for length in lengths)
    running: list[list[int]] = []  # of each row its length, and the tokens made so far
    steps: list[tuple[int, int]] = []
    retracted, share = 0, kept
    while waiting or running:
        held = sum(PROMPT + done for _, done in running)
        later = share * sum(GREATEST - done for _, done in running)
        while waiting and len(running) < most and pool - held - later >= PROMPT + GREATEST:
            length, done = waiting.popleft()
            running.append([length, done])
            held += PROMPT + done
            later += share * (GREATEST - done)
        share = max(0.0, share - kept / 600)
        while held + len(running) > pool and len(running) > 1:
            youngest = min(range(len(running)), key=lambda i: running[i][1])
            length, done = running.pop(youngest)
            waiting.appendleft((length, done))
            held -= PROMPT + done
            retracted += 1
            share = sum(20 + done for _, done in running) / (GREATEST * len(running))
        steps.append((len(running), held))
        for row in running:
            row[1] += 1
        running = [row for row in running if row[1] < row[0]]
    return steps, retracted


@pytest.mark.parametrize("lengths", [LONG_TAIL, SHORT_TAIL, OFTEN_CUT, SHORT_OR_GREATEST], ids=str)
@pytest.mark.parametrize(("rows", "most"), [(192, 192), (320, 64), (640, 48)])
def test_time_is_that_of_a_server_with_such_a_pool(lengths: Lengths, rows: int, most: int) -> None:
    """Each step at the price of one of rows of one length. What the server waits for the pool, and reads
    again, is not in the prediction."""
    cluster, given = load_cluster("h100x8"), work(rows, lengths)
    pool = room(given, most)
    assert pool < 0.95 * most * (PROMPT + GREATEST)

    def step_s(count: int, context: float) -> float:
        one = Workload(count, int(context), 1)
        return decode_s(Execution(SHAPE, "bf16", one, ONE, count, cluster, SGLANG))

    found: list[float] = []
    for seed in range(4):
        steps, retracted = served(drawn(lengths, rows, seed), most, pool, foresight(most, pool, given))
        assert retracted <= 0.05 * rows
        found.append(sum(step_s(count, held / count) for count, held in steps))
    run = Execution(SHAPE, "bf16", given, ONE, most, cluster, SGLANG)
    prompts = rows / min(rows, most) * prefill_s(run, min(rows, most), PROMPT)
    predicted = node_time_s("generate", SHAPE, "bf16", given, ONE, most, cluster, SGLANG) - prompts
    assert predicted == pytest.approx(np.mean(found), rel=0.05)
