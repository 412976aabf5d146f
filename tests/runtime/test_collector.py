"""Which rows a region hands out, on rows that are told apart by eye."""

from __future__ import annotations

import pytest
import torch

from hflow.graph.ir import Node, Output, Region
from hflow.graph.types import Dim, Factor, ValueType
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import Rows, from_strings
from hflow.runtime.worker.collector import Collector

ROUNDS = (("no a", "yes b", "yes c"), ("yes d", "no e", "yes f"), ("no g", "no h", "yes i"))


def collect(rows: int, times: int, short: str = "fail") -> tuple[dict[str, Rows], Collector]:
    """Rounds of three prompts with two samples each; what starts with `yes` is kept."""
    dim = Dim((Factor("batch", rows),))
    types = {"prompt": "str", "sample": "str", "number": "f32"}
    outputs = tuple(Output(port, ValueType(dtype, (dim,))) for port, dtype in types.items())  # type: ignore[arg-type]
    node = Node("sampling", "repeat", outputs=outputs, options={"short": short})
    collector = Collector(node, Region("sampling", times, rows=rows))
    for prompts in ROUNDS:
        if collector.done:
            break
        keep = torch.tensor([p.startswith("yes") for p in prompts])
        samples = [f"{p}{i}" for p in prompts for i in (1, 2)]
        numbers = torch.tensor([float(ord(s[-2]) * 10 + int(s[-1])) for s in samples])
        values = {"prompt": from_strings(prompts), "sample": from_strings(samples), "number": Rows(numbers)}
        collector.add({"keep": Rows(keep), **values})
    return collector.collected(), collector


def test_rounds_go_on_until_there_are_enough_rows() -> None:
    found, collector = collect(rows=3, times=9)
    assert (collector.rounds, collector.kept, collector.drawn) == (2, 4, 6)
    assert found["prompt"].strings() == ["yes b", "yes c", "yes d"]  # `yes f` is one too many
    assert found["sample"].strings() == ["yes b1", "yes b2", "yes c1", "yes c2", "yes d1", "yes d2"]
    assert found["number"].values.tolist() == [981, 982, 991, 992, 1001, 1002]


def test_one_round_can_be_enough() -> None:
    found, collector = collect(rows=2, times=9)
    assert collector.rounds == 1 and found["prompt"].strings() == ["yes b", "yes c"]


def test_a_short_batch_is_filled_with_the_first_that_were_not_kept() -> None:
    found, _ = collect(rows=5, times=2, short="fill")
    assert found["prompt"].strings() == ["yes b", "yes c", "yes d", "yes f", "no a"]
    assert found["sample"].strings()[-2:] == ["no a1", "no a2"]


@pytest.mark.parametrize(
    ("rows", "times", "short", "message"),
    [
        (5, 2, "fail", "after 2 rounds 4 of 5 rows were kept; 6 were drawn"),
        (4, 1, "fail", "after 1 round 2 of 4 rows were kept; 3 were drawn"),
        (4, 1, "fill", "after 1 round 2 of 4 rows were kept; 3 were drawn"),
    ],
)
def test_too_few_rows(rows: int, times: int, short: str, message: str) -> None:
    with pytest.raises(NodeError) as caught:
        collect(rows, times, short)
    assert (caught.value.code, caught.value.message) == ("HF408", message)


def test_a_surplus_waits_for_the_next_step_and_no_longer() -> None:
    _, collector = collect(rows=3, times=9)
    left = collector.surplus()
    assert left.rows["prompt"].strings() == ["yes f"] and left.waited.tolist() == [0]
    assert left.rows["sample"].strings() == ["yes f1", "yes f2"]
    assert len(left.younger(0)) == 0
    waiting = left.younger(1)
    next_ = Collector(collector.node, collector.region, waiting)
    assert (next_.waiting, next_.kept, next_.rounds, next_.done) == (1, 1, 0, False)
    prompts = ["yes x", "no y", "yes z", "yes w"]
    samples = [f"{p}{i}" for p in prompts for i in (1, 2)]
    keep = torch.tensor([p.startswith("yes") for p in prompts])
    values = {"prompt": from_strings(prompts), "sample": from_strings(samples), "number": Rows(torch.ones(8))}
    next_.add({"keep": Rows(keep), **values})
    assert next_.collected()["prompt"].strings() == ["yes f", "yes x", "yes z"]
    again = next_.surplus()
    assert again.rows["sample"].strings() == ["yes w1", "yes w2"] and again.waited.tolist() == [0]
    enough = Collector(collector.node, Region("sampling", 9, rows=1), again.younger(1))
    assert enough.done and enough.collected()["prompt"].strings() == ["yes w"]
