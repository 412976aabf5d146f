"""Carried values, regions, older weights, refreshed models and ordered trainings, under every plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.engines.python.data import open_source
from hflow.runtime.execute import execute
from hflow.runtime.rows import Rows
from hflow.runtime.run import Run
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.worker.carried import Carried
from tests.runtime.graphs.functions import checksum

GRAPHS = Path(__file__).parent / "graphs"
LAYOUTS = {"one worker": "tp1@0", "dp2": "dp2@0-1", "tp2": "tp2@0-1", "apart": ""}
APART = {"actor_train": "dp2@0-1", "again": "dp2@0-1", "first": "dp2@0-1", "rollout": "tp2@2-3"}
ELSEWHERE = "dp2@2-3"

Start = Callable[..., Run]


def load(name: str, model: Path | str, **params: object) -> Graph:
    return hflow.load(
        GRAPHS / f"{name}.yaml", [f"params.{k}={v}" for k, v in {"model": model, **params}.items()]
    )


def compiled(graph: Graph, layout: str) -> Plan:
    """All nodes in one layout on the same devices, or trainings apart from what reads models."""
    names = [n.name for n in graph.nodes if n.model]
    pins = [f"{name}={LAYOUTS[layout] or APART.get(name, ELSEWHERE)}" for name in names]
    return hflow.compile(graph, "clusters/local4.yaml", pins)


@pytest.fixture
def start(workers: Pool, tiny_model: Path, tmp_path: Path) -> Start:
    """Runs a graph of this folder; `model` is the tiny one unless a param says otherwise."""
    numbers = iter(range(100))

    def run(name: str, layout: str = "one worker", export: bool = False, **params: object) -> Run:
        plan = compiled(load(name, **{"model": tiny_model, **params}), layout)  # type: ignore[arg-type]
        return execute(plan, tmp_path / f"{name}{next(numbers)}", pool=workers, export=export)

    return run


def column(run: Run, name: str) -> list[float]:
    return [m[name] for m in run.metrics]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_carried_value_is_that_of_a_python_loop(start: Start, layout: str) -> None:
    """Evaluation between the steps reads the last total and leaves it alone."""
    run = start("carried", layout, every=1)
    means = column(run, "sum.mean")
    assert len(set(means)) > 1
    totals = [5.0]
    for mean in means:
        totals.append(totals[-1] + mean)
    assert column(run, "sum.total") == pytest.approx(totals[1:])
    assert column(run, "scaled.scaled") == pytest.approx(totals[:-1])
    assert column(run, "sum.twice") == pytest.approx([-1.0, -1.0, *totals[1:3]])
    assert run.evaluations == pytest.approx(dict(enumerate(totals)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_functions_may_write_into_what_they_read(start: Start, layout: str) -> None:
    """What other nodes, later steps and evaluations read is what functions that do not write leave behind."""
    plain = start("carried", every=1)
    run = start("in_place", layout, every=1)
    for name in ("sum.mean", "sum.total", "sum.twice", "scaled.scaled"):
        assert column(run, name) == pytest.approx(column(plain, name)), name
    assert column(run, "sum.gap") == pytest.approx(column(plain, "sum.mean"))
    assert run.evaluations == pytest.approx(plain.evaluations)
    assert column(start("in_place", layout), "sum.total") == column(run, "sum.total")


def test_a_kept_value_is_nobody_elses() -> None:
    carried, given = Carried(), Rows(torch.tensor([1.0]))
    carried.keep("sum.total", given, lag=2)
    given.values.zero_()
    carried.recall("sum.total", 1, Rows(torch.tensor([5.0]))).values.zero_()
    assert carried.recall("sum.total", 1, Rows(torch.tensor([5.0]))).values.tolist() == [1.0]


def test_each_data_node_draws_in_an_order_of_its_own(start: Start, tiny_model: Path) -> None:
    run = start("two_datasets", "dp2")
    graph = load("two_datasets", tiny_model)
    for node, reader, stream in (("texts", "questions", 0), ("others", "other_questions", 1)):
        drawn = [checksum(texts_of(graph, node, step, stream)["question"]) for step in range(3)]
        assert column(run, f"{reader}.checksum") == drawn
    assert set(column(run, "questions.checksum")).isdisjoint(column(run, "other_questions.checksum"))


def texts_of(graph: Graph, name: str, draw: int, stream: int = 0) -> dict[str, list[str]]:
    """The strings of a batch of a data node, by column."""
    node = graph.node(name)
    rows = node.options["batch"]
    source = open_source(node, {"actor": load_tokenizer(graph.model("actor").path)})
    plan = NodePlan(name, "data", None, "python", None, rows, 0.0, 0.0, 0)  # type: ignore[arg-type]
    outputs = source.draw(EngineCall(node, plan, 0, rows, graph.seed, draw, stream=stream)).outputs
    return {o.port: outputs[o.port].strings() for o in node.outputs if o.type.dtype == "str"}


def by_hand(graph: Graph, draws: list[int], rows: int, fill: bool) -> tuple[list[str], list[bool]]:
    """The questions that a step's region collects from the batches `draws`, and whether each was kept."""
    columns = [texts_of(graph, "texts", draw) for draw in draws]
    found = [row for texts in columns for row in zip(texts["question"], texts["answer"])]
    even = [int(answer) % 2 == 0 for _, answer in found]
    kept = [question for (question, _), is_even in zip(found, even) if is_even]
    others = [question for (question, _), is_even in zip(found, even) if fill and not is_even]
    return [*kept, *others][:rows], even


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_region_collects_what_filtering_by_hand_gives(start: Start, tiny_model: Path, layout: str) -> None:
    run = start("region", layout)
    graph = load("region", tiny_model)
    done = 0
    for metrics in run.metrics:
        rounds = int(metrics["sampling.rounds"])
        questions, kept = by_hand(graph, list(range(done, done + rounds)), 8, fill=False)
        assert metrics["questions.checksum"] == checksum(questions) and len(questions) == 8
        assert metrics["questions.whole"] == 8 and metrics["answers.whole"] == 16
        assert metrics["sampling.kept"] == pytest.approx(sum(kept) / len(kept))
        assert sum(kept[:-6]) < 8, "one round more than needed"
        done += rounds
    assert done > 3, "no step needed a second round"


def test_regions_are_the_same_under_every_plan(start: Start) -> None:
    one, *others = (start("region", layout) for layout in LAYOUTS)
    for other in others:
        for name in ("digest.rollout", "answers.checksum", "questions.checksum", "sampling.rounds"):
            assert column(other, name) == column(one, name), name
        ours, theirs = (column(r, "loss.actor_train") for r in (other, one))
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert len(set(column(one, "answers.checksum"))) == 3


def test_a_region_may_score_with_the_weights_that_are_trained(
    start: Start, workers: Pool, tiny_model: Path, tmp_path: Path
) -> None:
    """They are not donated to the copy that the region samples with: in every round both are needed."""
    pins = ("rollout=dp2@0-1", "old=tp2@0-1", "actor_train=tp2@0-1")
    plan = hflow.compile(load("region_scored", tiny_model), "clusters/local4.yaml", pins)
    run = execute(plan, tmp_path / "scored", pool=workers, export=False)
    for name in ("digest.rollout", "answers.checksum", "sampling.rounds"):
        assert column(run, name) == column(start("region"), name), name
    assert max(column(run, "sampling.rounds")) > 1


def test_a_surplus_serves_the_next_step(start: Start, tiny_model: Path) -> None:
    """Batches in which more is kept than two steps need: some waits for one step, and some too long."""
    runs = [start("region", layout, rows=2, batch=12, age=1, steps=6) for layout in LAYOUTS]
    graph = load("region", tiny_model, rows=2, batch=12, age=1)
    waiting: list[tuple[str, int]] = []  # and since which step
    draws = dropped_in_all = 0
    for step, metrics in enumerate(runs[0].metrics):
        kept = [(question, since) for question, since in waiting if step - since <= 1]
        assert metrics["sampling.waiting"] == len(kept)
        assert metrics["sampling.dropped"] == len(waiting) - len(kept)
        dropped_in_all += len(waiting) - len(kept)
        rounds = 0
        while len(kept) < 2:
            kept += [(question, step) for question in by_hand(graph, [draws], 12, fill=False)[0]]
            draws, rounds = draws + 1, rounds + 1
        assert metrics["sampling.rounds"] == rounds
        assert metrics["questions.checksum"] == checksum([question for question, _ in kept[:2]])
        ages = [step - since for _, since in kept[:2]]
        assert metrics["actor_train.staleness"] == pytest.approx(sum(ages) / 2)
        waiting = kept[2:]
    assert dropped_in_all and {0.0} < set(column(runs[0], "sampling.waiting"))
    assert 0 in column(runs[0], "sampling.rounds"), "a step that needs no round"
    for run in runs[1:]:
        for name in ("answers.checksum", "questions.checksum", "sampling.rounds", "actor_train.staleness"):
            assert column(run, name) == column(runs[0], name), name
        ours, theirs = (column(r, "loss.actor_train") for r in (run, runs[0]))
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_region_without_enough_rows_fails_or_fills(start: Start, tiny_model: Path) -> None:
    with pytest.raises(HflowError, match="HF408") as caught:
        start("region", times=2, rows=12)
    found = caught.value.diagnostics[0]
    kept = sum(by_hand(load("region", tiny_model), [0, 1], 12, fill=False)[1])
    assert f"after 2 rounds {kept} of 12 rows were kept" in found.message
    assert found.span and found.span.file.endswith("region.yaml") and found.span.line == 9
    with pytest.raises(HflowError, match="HF408"):
        start("region", "apart", times=2, rows=12)  # its training waits for rows that never come
    run = start("region", times=2, rows=10, short="fill", steps=2)
    for step, checksum_ in enumerate(column(run, "questions.checksum")):
        questions, kept = by_hand(load("region", tiny_model), [2 * step, 2 * step + 1], 10, fill=True)
        assert checksum_ == checksum(questions) and sum(kept) < 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollouts_with_older_weights(start: Start, layout: str) -> None:
    """Steps 0 and 1 sample as an untrained run does, step 2 as one that starts from the weights after the
    first update: step k takes those before the update of step k - 1. Evaluation takes the newest."""
    lagged = start("lagged", layout)
    first = start("lagged", steps=1, export=True)
    weights = first.folder / "export/actor"
    initial = start("lagged", lag=0, lr=0.0, steps=2)
    updated = start("lagged", lag=0, lr=0.0, model=weights)
    on_policy = start("lagged", lag=0)
    sampled = column(lagged, "digest.rollout")
    assert sampled == [*column(initial, "digest.rollout"), column(updated, "digest.rollout")[2]]
    assert sampled[1:] != column(on_policy, "digest.rollout")[1:]
    assert first.evaluations[1] == updated.evaluations[0]
    assert lagged.evaluations[3] != lagged.evaluations[0]


def test_older_weights_under_every_plan(start: Start) -> None:
    one, *others = (start("lagged", layout) for layout in LAYOUTS)
    for other in others:
        assert column(other, "digest.rollout") == column(one, "digest.rollout")
        assert column(other, "loss.actor_train") == pytest.approx(column(one, "loss.actor_train"), rel=1e-5)
        assert other.evaluations == pytest.approx(one.evaluations)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refreshed_model_equals_its_source(start: Start, layout: str) -> None:
    """Before steps 2 and 4 only; differences between layouts are those of summing in another order."""
    differences = column(start("refreshed", layout, steps=5), "difference.largest")
    assert [d < 1e-5 for d in differences] == [True, False, True, False, True]
    assert all(d > 1e-3 for d in differences[1::2])


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "apart"])
def test_two_trainings_are_two_epochs(start: Start, tmp_path: Path, layout: str) -> None:
    """Two nodes on the same rows, with one optimizer, make the updates of one node that walks them twice."""
    text = (GRAPHS / "trained_twice.yaml").read_text()
    again = text[text.index("  again:") : text.index("  first:")]
    (tmp_path / "functions.py").write_text((GRAPHS / "functions.py").read_text())
    (tmp_path / "once.yaml").write_text(text.replace(again, ""))
    twice = start("trained_twice", layout, export=True)
    once = start(tmp_path / "once", layout, export=True, epochs=2)
    ours, theirs = (load_file(r.folder / "export/actor/model.safetensors") for r in (twice, once))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert column(twice, "loss.again")[0] < column(twice, "loss.first")[0]


def test_pairs_under_every_plan(start: Start) -> None:
    one = start("pairs", minibatch=12)
    for layout in ("dp2", "tp2", "apart"):
        other = start("pairs", layout, minibatch=12)
        assert column(other, "loss.actor_train") == pytest.approx(column(one, "loss.actor_train"), rel=1e-5)
    assert column(one, "loss.actor_train")[0] == pytest.approx(torch.tensor(2.0).log().item())


def test_metrics_of_whole_batches_are_reported_once(start: Start) -> None:
    """A sum over workers would be twice the number of rows under dp2."""
    assert column(start("region", "dp2", steps=1), "answers.whole") == [16.0]
