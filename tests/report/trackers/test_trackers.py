"""Runs in TensorBoard, W&B (offline) and MLflow, written by hflow and read by these libraries."""

from __future__ import annotations

import json
import math
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.plan.plan import Plan
from hflow.report.trackers import registry
from hflow.report.trackers.mlflow_store import MlflowTracker, plain_name
from hflow.report.trackers.registry import TRACKERS, make_trackers
from hflow.runtime.controller import tracking
from hflow.runtime.controller.tracking import TrackedRun, Tracker, Tracking, values_before
from tests.report.sampled import HOSTILE, keep, sample

EDGE = "time_s.rollout.tokens,mask -> actor_train"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hflow.compile(hflow.load("grpo", "params.model=shape:qwen2.5-0.5b"), "h100x1")


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Path:
    run = tmp_path / "runs" / "grpo"
    run.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    (run / "graph.yaml").write_text(plan.graph.text)
    (run / "report.html").write_text("<p>report</p>")
    return run


def line(step: int, attempt: int = 0) -> dict[str, Any]:
    """Of metrics.jsonl; another in another attempt."""
    value = step + attempt / 100
    times = {"time_s": value, "time_s.prompts": value, EDGE: value, "time_s.actor => rollout": value}
    return {"step": step, "reward_mean": value, "loss.actor_train": math.nan, **times, "digest.rollout": "ab"}


def evaluated(step: int) -> dict[str, Any]:
    return {"event": "evaluated", "step": step, "metric": "reward.score", "value": step / 10}


def named(step: int) -> dict[str, Any]:
    return {
        "event": "evaluated",
        "step": step,
        "evaluation": "test",
        "metrics": {"eval/test/pass@1": step / 5},
    }


def attempt(
    tracker: Tracker, run: Path, plan: Plan, steps: Sequence[int], number: int, before: Sequence[int] = ()
) -> list[str]:
    """Steps of a run, each with samples, and an evaluation before the first."""
    told: list[str] = []
    feed = Tracking([tracker], told.append)
    lines = [line(step) for step in before]
    first = steps[0]
    events = [evaluated(0), named(0), evaluated(first)] if before else []
    feed.begin(TrackedRun(run, plan, first, values_before(first, lines, events)))
    if not before:
        feed.evaluated(evaluated(first))
    for step in steps:
        feed.step(line(step, number))
        feed.samples(step, keep(run, step, [sample(response=HOSTILE, reward=0.5)]))
    feed.evaluated(evaluated(steps[-1] + 1))
    feed.evaluated(named(steps[-1] + 1))
    feed.finish("finished", [run / "report.html", run / "graph.yaml"])
    return told


def tensorboard(run: Path) -> Mapping[str, list[tuple[int, Any]]]:
    """Steps and values by tag, as the program itself reads them: its older reader forgets other events."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    read.Reload()
    found = {tag: read.Tensors(tag) for tag in read.Tags()["tensors"]}
    return {tag: [(e.step, make_ndarray(e.tensor_proto).ravel()[0]) for e in es] for tag, es in found.items()}


def records(file: Path) -> Iterator[bytes]:
    """Those of a W&B file: LevelDB's log format (https://github.com/google/leveldb/blob/main/doc/log_format.md)
    behind seven bytes."""
    data, at, found = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        found, at = found + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield found
            found = b""


def wandb_history(run: Path) -> Mapping[str, list[tuple[int, Any]]]:
    """What the one offline run in the folder holds, by metric."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    (folder,) = (run / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    found = defaultdict[str, list[tuple[int, Any]]](list)
    for data in records(file):
        record = Record.FromString(data)
        items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for name in items.keys() - {"_step", "_runtime", "_timestamp"}:
            found[name].append((record.history.step.num, items[name]))
    return found


def expected(steps: Sequence[int], attempts: Mapping[int, int]) -> list[Any]:
    return [(step, pytest.approx(line(step, attempts[step])["time_s"])) for step in steps]


OF_TWO = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}  # steps by the attempt that made them


def test_tensorboard_has_each_step_once(run: Path, plan: Plan) -> None:
    pytest.importorskip("tensorboard")
    assert attempt(TRACKERS["tensorboard"](), run, plan, [0, 1, 2, 3], 0) == []
    assert attempt(TRACKERS["tensorboard"](), run, plan, [2, 3, 4], 1, before=[0, 1]) == []
    found = tensorboard(run)
    for tag in ("time_s", "time_s/prompts", "time_s/actor => rollout", "reward_mean"):
        assert found[tag] == expected(range(5), OF_TWO), tag
    assert found["eval/reward.score"] == [(0, 0.0), (2, pytest.approx(0.2)), (5, 0.5)]
    assert found["eval/test/pass@1"] == [(5, 1.0)]  # of step 4 nothing: it was made again
    assert [step for step, _ in found["samples/text_summary"]] == [0, 1, 2, 3, 4]
    assert b"rollout" in found["plan/text_summary"][-1][1]
    lines = [told for _, text in found["samples/text_summary"] for told in text.decode().split("\n")]
    assert all(told.startswith("    ") for told in lines)


@pytest.mark.slow
def test_wandb_has_each_step_once(run: Path, plan: Plan) -> None:
    pytest.importorskip("wandb")
    assert attempt(TRACKERS["wandb"](), run, plan, [0, 1, 2, 3], 0) == []
    assert attempt(TRACKERS["wandb"](), run, plan, [2, 3, 4], 1, before=[0, 1]) == []
    found = wandb_history(run)
    for name in ("time_s", "time_s/prompts", "reward_mean"):
        assert found[name] == expected(range(5), OF_TWO), name
    assert found["eval/reward.score"] == [(0, 0.0), (2, 0.2), (5, 0.5)]
    assert found["eval/test/pass@1"] == [(0, 0.0), (5, 1.0)]
    assert found["samples._type"] == [(step, "table-file") for step in range(5)]
    (folder,) = (run / "wandb").glob("offline-run-*/files")
    assert {"plan.json", "graph.yaml", "report.html"} <= {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_mlflow_has_each_step_once(run: Path, plan: Plan) -> None:
    """It can take nothing back: steps that it has stay as they are."""
    pytest.importorskip("mlflow")
    assert attempt(MlflowTracker(), run, plan, [0, 1, 2, 3], 0) == []
    assert attempt(MlflowTracker(), run, plan, [2, 3, 4], 1, before=[0, 1]) == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("grpo")
    assert experiment
    (found,) = client.search_runs([experiment.experiment_id])
    history = {m: client.get_metric_history(found.info.run_id, m) for m in found.data.metrics}
    steps = {name: [(m.step, m.value) for m in points] for name, points in history.items()}
    for name in ("time_s", "time_s.prompts", "time_s.rollout.tokens_mask to actor_train"):
        assert steps[name] == expected(range(5), {**OF_TWO, 2: 0, 3: 0}), name
    assert steps["eval.reward.score"] == [(0, 0.0), (4, 0.4), (2, 0.2), (5, 0.5)]
    assert steps["eval_test_pass at 1"] == [(4, 0.8), (0, 0.0), (5, 1.0)]
    assert found.info.status == "FINISHED" and found.data.params["plan"] == plan.hash
    files = {f.path for f in client.list_artifacts(found.info.run_id)}
    assert {"report.html", "graph.yaml", "samples"} <= files
    assert len(client.list_artifacts(found.info.run_id, "samples")) == 10


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_samples_that_have_made_room_are_left_out(run: Path, plan: Plan, name: str) -> None:
    """The table of a step may be gone before a tracker comes to it."""
    pytest.importorskip(name)
    told: list[str] = []
    feed = Tracking([TRACKERS[name]()], told.append)
    feed.begin(TrackedRun(run, plan))
    feed.samples(0, run / "samples" / "step-000000.parquet")
    feed.step(line(0))
    feed.finish("finished", [])
    found = tensorboard(run) if name == "tensorboard" else wandb_history(run)
    assert found["reward_mean"] == [(0, 0.0)] and told == []


def test_a_tracker_that_comes_later_gets_the_steps_before(run: Path, plan: Plan) -> None:
    pytest.importorskip("tensorboard")
    assert attempt(TRACKERS["tensorboard"](), run, plan, [2], 0, before=[0, 1]) == []
    assert tensorboard(run)["time_s"] == expected(range(3), dict.fromkeys(range(3), 0))


def test_names_for_mlflow_are_told_apart_and_accepted() -> None:
    mlflow = pytest.importorskip("mlflow.utils.validation")
    names = [
        *line(0),
        "eval.reward.score",
        "eval/test/pass@1",
        "eval/test/pass_1",
        "time_s.onload actor_train",
        "a.b/c",
        "ä.b",
    ]
    plain = [plain_name(name) for name in names]
    assert len(set(plain)) == len(names)
    for name in plain:
        mlflow._validate_metric_name(name)


class Failing:
    name = "failing"

    def __init__(self, at: str, hangs: bool = False):
        self.at, self.hangs, self.calls = at, hangs, list[str]()

    def _call(self, method: str) -> None:
        self.calls.append(method)
        if method == self.at:
            if self.hangs:
                threading.Event().wait()
            raise SystemExit("no such server\nand more")

    def begin(self, run: TrackedRun) -> None:
        self._call("begin")

    def values(self, step: int, values: Mapping[str, float]) -> None:
        self._call("values")

    def samples(self, step: int, file: Path) -> None:
        self._call("samples")

    def finish(self, status: str, files: Sequence[Path]) -> None:
        self._call("finish")


@pytest.mark.parametrize("at", ["begin", "values", "samples", "finish"])
def test_a_tracker_that_fails_is_told_of_once(run: Path, plan: Plan, at: str) -> None:
    failing = Failing(at)
    told = attempt(failing, run, plan, [0, 1, 2], 0)
    assert told == ["tracker `failing` failed, and is not used any more: SystemExit: no such server"]
    assert failing.calls.count(at) == 1 and failing.calls[-1] == at


def test_a_tracker_that_hangs_is_left_behind(run: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "END_S", 0.2)
    told = attempt(Failing("values", hangs=True), run, plan, [0, 1], 0)
    assert told == ["tracker `failing` has not ended after 0.2 s; it may lack the last steps"]


def test_one_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: make().name for name, make in TRACKERS.items()} == {name: name for name in TRACKERS}
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(HflowError, match=r"(?s)HF404.*`wandb` is not.*install -e '\.\[wandb\]'"):
        make_trackers(["wandb", "mlflow"])
