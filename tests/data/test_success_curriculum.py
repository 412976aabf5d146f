"""A curriculum by success: draws against exact probabilities of successive sampling, logarithms against the
machine's, weights against their formula, and whole data nodes against a ledger kept by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hflow.graph.row_sources import SuccessCurriculum
from hflow.plan.layout import Mesh
from hflow.runtime.engines.protocol import Result
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.row_order import RowOrder, groups_of
from hflow.runtime.rows import Rows
from hflow.runtime.success_rates import SuccessRates
from hflow.runtime.weighted_draw import draw, log
from hflow.runtime.worker.carried import Carried, initial_value
from tests.data.python_engine import TOKENIZER, call
from tests.data.test_data_nodes import data_node, dataset

ROWS: list[dict[str, Any]] = [{"meta": {"sum": f"{a} + 0"}, "answer": str(a)} for a in range(40)]


def successive(weights: tuple[int, ...], order: tuple[int, ...]) -> Fraction:
    """That rows are drawn in this order, each by its share of the weights of those that are left."""
    left, chance = sum(weights), Fraction(1)
    for row in order:
        chance, left = chance * Fraction(weights[row], left), left - weights[row]
    return chance


def test_rows_are_drawn_as_often_as_successive_sampling_would() -> None:
    """Chi-square over the 60 ordered draws of 3 of 5 rows: 87.2 is the 99th percentile at 59 degrees of
    freedom. Keys are fixed, so it cannot flicker."""
    weights, times = (1, 2, 3, 10, 4), 20000
    floats = np.array(weights, np.float64)
    found = Counter(tuple(draw(floats, 3, f"7/{n}").tolist()) for n in range(times))
    orders = list(permutations(range(5), 3))
    assert sum(found.values()) == times and found.keys() <= set(orders)

    def statistic(weights: tuple[int, ...]) -> float:
        expected = {order: float(successive(weights, order)) * times for order in orders}
        return sum((found[order] - expected[order]) ** 2 / expected[order] for order in orders)

    assert statistic(weights) < 87.2
    assert statistic((1, 2, 3, 11, 4)) > 87.2, "it tells weights apart that differ by a tenth"


def test_a_row_waits_for_a_time_of_its_own() -> None:
    """More rows, or other weights of others, leave the order of the rest as it is."""
    weights = np.linspace(0.1, 1, 50)
    order = draw(weights, 50, "key").tolist()
    longer = draw(np.append(weights, [0.5, 0.5]), 52, "key").tolist()
    assert [row for row in longer if row < 50] == order
    changed = weights.copy()
    changed[17] = 9.0
    others = [row for row in draw(changed, 50, "key").tolist() if row != 17]
    assert others == [row for row in order if row != 17]
    assert draw(weights, 50, "other").tolist() != order and sorted(order) == list(range(50))


def test_logarithms_are_those_of_the_machine() -> None:
    values = np.concatenate([np.logspace(-300, 300, 997), 1 - np.logspace(-16, -1, 200), [2**-54, 0.5, 1.0]])
    expected = np.array([math.log(v) for v in values])
    assert np.allclose(log(values), expected, rtol=4e-16, atol=3e-16)


def test_weights_are_greatest_at_the_target() -> None:
    """With target 0.5 and much tried rows, floor + (1 - floor) * 4 p (1 - p)."""
    rates = SuccessRates.of(SuccessCurriculum("a.b", floor=0.2), 6)
    shares = np.array([0, 0.1, 0.5, 0.75, 1.0])
    rates.tries[:5], rates.successes[:5] = 1e7, 1e7 * shares
    expected = 0.2 + 0.8 * 4 * shares * (1 - shares)
    assert np.allclose(rates.weights()[:5], expected, atol=1e-5)
    assert rates.weights()[5] == 1.0, "a row that was never tried"
    easier = SuccessRates.of(SuccessCurriculum("a.b", target=0.8, floor=0.1), 101)
    easier.tries[:], easier.successes[:] = 1e7, 1e7 * np.arange(101) / 100
    weights = easier.weights()
    assert int(weights.argmax()) == 80 and weights[80] == pytest.approx(1)
    assert (np.diff(weights[:81]) > 0).all() and (np.diff(weights[80:]) < 0).all()
    assert weights[[0, 100]] == pytest.approx([0.1, 0.1], abs=1e-5)


def test_sources_of_a_mixture_keep_their_shares() -> None:
    order = RowOrder(groups_of(["a", "b"], [3, 1], [0] * 30 + [1] * 30, None))
    weights = np.full(60, 0.01)
    weights[[4, 33]] = 100.0
    for step in range(5):
        batch = order.batch(1, step, 8, weights=weights)
        assert len(set(batch)) == 8 and sum(row < 30 for row in batch) == 6 and {4, 33} <= set(batch)


def numbers(result: Result) -> list[int]:
    assert result.numbers is not None
    return result.numbers.tolist()


class Ledger:
    """What a data node should draw, from dicts and floats of Python."""

    def __init__(self, curriculum: Mapping[str, Any], rows: int):
        self.said = {"threshold": 1.0, "target": 0.5, "floor": 0.1, "decay": 1.0, "lag": 1} | dict(curriculum)
        self.counts = dict.fromkeys(range(rows), (0.0, 0.0))
        self.steps: list[list[int]] = []

    def weight(self, row: int) -> float:
        tries, right = self.counts[row]
        target, floor = self.said["target"], self.said["floor"]
        share = (right + target) / (tries + 1)
        x = share / target if share < target else (1 - share) / (1 - target)
        return floor + (1 - floor) * x * (2 - x)

    def fed(self, values: Mapping[int, list[float]]) -> None:
        """`values`: of each row of a step."""
        for row, own in values.items():
            tries, right = (self.said["decay"] * count for count in self.counts[row])
            self.counts[row] = tries + len(own), right + sum(v >= self.said["threshold"] for v in own)


@pytest.mark.parametrize("lag", [1, 2])
def test_a_node_counts_what_earlier_steps_gave(tmp_path: Path, lag: int) -> None:
    """Two workers of three rows each see all values, and draw the same; one begins anew from what the other
    keeps. Counts are those of the ledger, and rows that fail ever come back seldom."""
    said = {"success": "reward.score", "threshold": 0.5, "floor": 0.02, "decay": 0.5, "lag": lag}
    node = data_node(dataset(tmp_path, ROWS), holdout=0, curriculum=said)
    first, second = (PythonEngine({"actor": TOKENIZER}) for _ in range(2))
    ledger, given = Ledger(said, 40), dict[int, torch.Tensor]()
    seen = Counter[int]()
    for step in range(40):
        values = given.get(step - lag, torch.zeros(18))
        inputs = {"success": Rows(values)}
        if step == 23:  # resumed under another plan
            second = PythonEngine({"actor": TOKENIZER})
            second.restore(node, {name.rpartition("/")[2]: kept for name, kept in first.state()})
        if step >= lag:
            drawn = ledger.steps[step - lag]
            ledger.fed({row: values[3 * i : 3 * i + 3].tolist() for i, row in enumerate(drawn)})
        halves = first.run(call(node, (0, 3), step), inputs), second.run(call(node, (3, 6), step), inputs)
        rows = [number for half in halves for number in numbers(half)]
        assert len(set(rows)) == 6
        ledger.steps.append(rows)
        rates = first._rates[node.name]
        assert [(rates.tries[r], rates.successes[r]) for r in range(40)] == list(ledger.counts.values())
        assert rates.weights() == pytest.approx([ledger.weight(row) for row in range(40)], rel=1e-12)
        told = halves[0].metrics["expected_success"], halves[0].metrics["tried_rows"]
        assert told[1] == (sum(tries > 0 for tries, _ in ledger.counts.values()), 1.0) and told[0][1] == 3.0
        given[step] = torch.tensor([float(row % 2 and k < 1) for row in rows for k in range(3)])
        seen.update(rows if step >= 20 else [])
    even, odd = (sum(seen[row] for row in range(start, 40, 2)) for start in (0, 1))
    assert odd > 2 * even, "even rows never succeed"


def test_evaluation_neither_counts_nor_draws(tmp_path: Path) -> None:
    node = data_node(dataset(tmp_path, ROWS), holdout=6, curriculum={"success": "reward.score"})
    engine = PythonEngine({"actor": TOKENIZER})
    engine.run(call(node, (0, 6), 0), {"success": Rows(torch.zeros(6))})
    before = {name: kept.clone() for name, kept in engine.state()}
    engine.run(call(node, (0, 6), 0, evaluation=True), {})
    after = dict(engine.state())
    assert before.keys() == after.keys() == {f"data/{node.name}/{n}" for n in ("tries", "successes", "drawn")}
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kept", [{}, {"tries": 39, "successes": 39}, {"tries": 40, "successes": 39}])
def test_counts_of_other_rows_are_refused(kept: Mapping[str, int]) -> None:
    rates = SuccessRates.of(SuccessCurriculum("a.b"), 40)
    with pytest.raises(ValueError, match="and there are 40 to train on"):
        rates.restore({name: torch.zeros(rows) for name, rows in kept.items()})
    whole = {name: torch.zeros(40) for name in ("tries", "successes")}
    with pytest.raises(ValueError, match="rows that are not there"):
        rates.restore(whole | {"drawn": torch.tensor([[3, 40]])})


def test_truth_values_count_as_they_are() -> None:
    rates = SuccessRates.of(SuccessCurriculum("a.b"), 3)
    rates.drawn.append(np.array([2, 0]))
    rates.count(torch.tensor([True, False, False, False]))
    assert rates.tries.tolist() == [2, 0, 2] and rates.successes.tolist() == [0, 0, 1]


def test_rows_are_carried_as_scalars_are(tmp_path: Path) -> None:
    carried = Carried()
    first = Rows(torch.arange(3.0))
    assert carried.recall("a.b", 2, first) is first
    carried.keep("a.b", Rows(torch.arange(3.0) + 10), 2)
    carried.keep("a.b", Rows(torch.arange(3.0) + 20), 2)
    ((name, values),) = carried.values()
    again = Carried()
    again.restore(name, values.reshape(2, 3))
    for lag, start in ((2, 10.0), (1, 20.0)):
        assert again.recall("a.b", lag, first).values.tolist() == [start, start + 1, start + 2]
    node = data_node(dataset(tmp_path, ROWS))
    mesh = Mesh.of((4, 5), dp=2)
    held = initial_value(node, "answer", mesh, 5, 0.0)
    assert held is not None and len(held) == node.outputs[0].type.rows // 2
    assert initial_value(node, "answer", mesh, 3, 0.0) is None
