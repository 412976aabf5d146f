"""Named evaluations of runs: against transformers, brute force, `eval`, and themselves under other plans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from math import comb
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hflow
from hflow.graph.ir import Graph
from hflow.graph.run_config import CheckpointPolicy, RunConfig
from hflow.plan.plan_file import load_plan
from hflow.report.report import RunReport, report_html
from hflow.report.run_status import read_summary
from hflow.report.runs import listed_run
from hflow.runtime.controller.checkpoints import complete
from hflow.runtime.controller.pool import Pool
from hflow.runtime.engines.protocol import EngineCall, Result
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.execute import execute
from hflow.runtime.rows import Rows
from hflow.runtime.run import Run
from hflow.runtime.tokenizer import load_tokenizer
from tests.runtime.matrix import GRAPHS
from tests.runtime.rewards import digits
from tests.runtime.test_language import compiled
from tests.runtime.test_resume import up_to

NEW = 9
THRESHOLD = 0.1
Seen = dict[str, list[Mapping[str, Rows]]]


def run_alone(model: Path, folder: Path, *overrides: str, config: RunConfig | None = None) -> Run:
    """In this process, on one device."""
    graph = hflow.load(GRAPHS / "evaluated.yaml", [f"params.model={model}", *overrides])
    plan = hflow.compile(graph, "local1")
    return execute(plan, folder, workers="inline", config=config or RunConfig())


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Seen]:
    """A run, and what came to each node of a metric, evaluation by evaluation."""
    seen: Seen = {}

    def noting(self: PythonEngine, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        seen.setdefault(call.node.name, []).append(dict(inputs))
        return own(self, call, inputs)

    own = PythonEngine.run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PythonEngine, "run", noting)
        config = RunConfig(CheckpointPolicy(every=1, keep=99))
        return run_alone(tiny_model, tmp_path_factory.mktemp("alone") / "run", config=config), seen


def greedy_by_transformers(folder: Path, tokenizer: Path) -> tuple[float, float, float]:
    """Score, length and share of finished responses of the first 7 rows of the evaluation's file."""
    lines = (GRAPHS / "evaluated.jsonl").read_text().splitlines()[:7]
    rows = [json.loads(line) for line in lines]
    own = load_tokenizer(tokenizer)
    ends = {"eos_token_id": own.eos_id, "pad_token_id": 0}
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for row in rows:
        prompt = own.encode([f"{row['question']}="])[0]
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, **ends)[0]
        tokens = whole.tolist()[len(prompt) :]
        text = own.decode([tokens])[0]
        found.append((digits([[text]], [row["answer"]])[0][0], len(tokens), tokens[-1] == own.eos_id))
    scores, lengths, ended = zip(*found)
    return mean(scores), mean(lengths), mean(map(float, ended))


def test_greedy_values_are_those_of_transformers_samples(made: tuple[Run, Seen], tiny_model: Path) -> None:
    """Before training with the model's own weights, after it with the exported ones. Scores are float32."""
    run, _ = made
    for done, folder in ((0, tiny_model), (4, run.folder / "export" / "actor")):
        values = [run.evaluated[f"eval/greedy/{name}"][done] for name in ("score", "length", "finished")]
        assert values == pytest.approx(greedy_by_transformers(folder, tiny_model), abs=1e-6)


def test_they_run_when_they_are_due(made: tuple[Run, Seen]) -> None:
    run, _ = made
    assert {key: list(by) for key, by in run.evaluated.items()} == {
        **{f"eval/greedy/{name}": [0, 4] for name in ("score", "length", "finished")},
        **{f"eval/sampled/{name}": [2, 4] for name in ("mean", "pass@1", "pass@4", "maj@3")},
    }


def test_sampled_metrics_are_what_brute_force_makes_of_the_samples(made: tuple[Run, Seen]) -> None:
    run, seen = made
    n, prompts = 6, 5
    for number, done in enumerate((2, 4)):
        voted = seen["eval/sampled/maj@3"][number]
        scores = voted["score"].values.reshape(prompts, n).tolist()
        answers = voted["answer"].strings()
        passes = [[score >= THRESHOLD for score in row] for row in scores]
        values = {name: run.evaluated[f"eval/sampled/{name}"][done] for name in ("mean", "pass@1", "pass@4")}
        assert values["mean"] == pytest.approx(mean(score for row in scores for score in row), abs=1e-6)
        for k, name in ((1, "pass@1"), (4, "pass@4")):
            drawn = [sum(map(any, combinations(row, k))) / comb(n, k) for row in passes]
            assert values[name] == pytest.approx(mean(drawn), abs=1e-6)
        right = [
            vote(answers[start : start + 3], passes[start // n][start % n : start % n + 3])
            for start in range(0, n * prompts, 3)
        ]
        assert run.evaluated["eval/sampled/maj@3"][done] == pytest.approx(mean(right), abs=1e-6)
    assert len({text for at in seen["eval/sampled/maj@3"] for text in at["answer"].strings()}) > 3


def vote(answers: list[str], passes: list[bool]) -> float:
    votes = Counter(filter(None, answers))
    first = [name for name in votes if votes[name] == max(votes.values())]
    counted = [float(ok) for name, ok in zip(answers, passes) if name in first]
    return mean(counted) if counted else 0.0


def test_events_summary_report_and_list_tell_them(made: tuple[Run, Seen]) -> None:
    run, _ = made
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    told = [(e["step"], e["evaluation"], set(e["metrics"])) for e in events if e["event"] == "evaluated"]
    assert [(step, name) for step, name, _ in told] == [
        (0, "greedy"), (2, "sampled"), (4, "greedy"), (4, "sampled")
    ]  # fmt: skip
    summary: dict[str, Any] = json.loads((run.folder / "summary.json").read_text())
    score = run.evaluated["eval/greedy/score"]
    assert summary["evaluations"]["eval/greedy/score"] == {
        "before": score[0], "after": score[4], "by_step": {"0": score[0], "4": score[4]}
    }  # fmt: skip
    assert summary["eval"] is None and read_summary(run.folder)
    page = report_html(RunReport(load_plan(run.folder / "plan.json"), run.metrics, summary))
    assert "eval/sampled/pass@4 by steps done" in page and "eval/greedy/score" in page
    listed = listed_run(run.folder)
    assert (listed.best_of, listed.best) == ("eval/greedy/score", max(score.values()))


@pytest.mark.slow
def test_a_resumed_run_has_the_same(made: tuple[Run, Seen], tiny_model: Path, tmp_path: Path) -> None:
    """What was measured before the checkpoint is read, the rest is measured again."""
    run, _ = made
    for step in (1, 2, 3):
        folder = up_to(run.folder, step, tmp_path / str(step))
        plan = load_plan(folder / "plan.json")
        resumed = execute(
            plan, folder, workers="inline", config=RunConfig(CheckpointPolicy(every=1)), resume=True
        )
        assert resumed.evaluated == run.evaluated
        before = {key for key, by in run.evaluated.items() if min(by) <= step}
        assert before  # some of it was read


@pytest.mark.slow
def test_best_may_be_one_of_them(made: tuple[Run, Seen], tiny_model: Path, tmp_path: Path) -> None:
    run, _ = made
    config = RunConfig(CheckpointPolicy(every=2, keep=1, best="eval/sampled/mean", mode="min"), export="best")
    other = run_alone(tiny_model, tmp_path / "run", config=config)
    values = other.evaluated["eval/sampled/mean"]
    assert values == run.evaluated["eval/sampled/mean"]
    best = min(values, key=values.__getitem__)
    assert set(complete(other.folder)) == {best, 4}
    exported = [json.loads(line) for line in (other.folder / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in exported if e["event"] == "exported"] == [best]


def test_too_few_rows_are_told_before_the_first_step(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(hflow.HflowError, match=r"HF403.*has 9 rows .*evaluation `greedy` needs 12"):
        run_alone(tiny_model, tmp_path / "run", "evaluations.greedy.rows=12")


@pytest.fixture(scope="module")
def one_step(tiny_model: Path) -> Graph:
    overrides = [f"params.model={tiny_model}", "params.steps=1", "evaluations.sampled.at=[start, end]"]
    return hflow.load(GRAPHS / "evaluated.yaml", overrides)


@pytest.fixture(scope="module")
def alone(one_step: Graph, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return execute(hflow.compile(one_step, "local1"), folder, workers="inline", export=False)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "apart"])
def test_other_plans_measure_the_same(
    alone: Run, one_step: Graph, workers: Pool, tmp_path: Path, layout: str
) -> None:
    """5 and 7 rows on two replicas. Weights after training differ by rounding, and so may samples: compared
    is what the first weights say."""
    other = execute(compiled(one_step, layout), tmp_path / layout, pool=workers, export=False)
    before, expected = ({key: by[0] for key, by in run.evaluated.items()} for run in (other, alone))
    assert before == pytest.approx(expected) and len(before) == 7


STEP = ("actor_train=tp2@0-1", "rollout=tp2@0-1", "ref_logprobs=tp2@0-1")


@pytest.fixture(scope="module")
def as_the_step(one_step: Graph, workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    plan = hflow.compile(one_step, "clusters/local4.yaml", STEP)
    return execute(plan, tmp_path_factory.mktemp("step") / "run", pool=workers, export=False)


@pytest.mark.parametrize(
    "pins",
    [("rollout@greedy=dp4@0-3", "rollout@sampled=dp2@0-1"), ("rollout@greedy=tp2@2-3", "rollout@sampled=@3")],
)
def test_they_may_run_in_layouts_of_their_own(
    as_the_step: Run, one_step: Graph, workers: Pool, tmp_path: Path, pins: tuple[str, ...]
) -> None:
    """On devices where the step's nodes are, and on others: 7 rows over four replicas. The step is the same,
    and so are the weights after it."""
    plan = hflow.compile(one_step, "clusters/local4.yaml", (*STEP, *pins))
    run = execute(plan, tmp_path / "run", pool=workers, export=False)
    for key, values in as_the_step.evaluated.items():
        assert run.evaluated[key] == pytest.approx(values), key
    assert run.evaluated.keys() == as_the_step.evaluated.keys()
    assert run.evaluated["eval/greedy/score"][0] != run.evaluated["eval/greedy/score"][1]


@pytest.mark.parametrize(("name", "metric"), [("lagged", "length.length"), ("carried", "scaled.scaled")])
def test_newest_weights_and_carried_values_are_read_as_eval_reads_them(
    workers: Pool, tiny_model: Path, tmp_path: Path, name: str, metric: str
) -> None:
    sampling = ", sampling: {n: 1, temperature: 0}" if name == "lagged" else ""
    said = f"evaluations={{same: {{rows: 8, every: 1, metrics: {{value: {metric}}}{sampling}}}}}"
    graph = hflow.load(GRAPHS / f"{name}.yaml", [f"params.model={tiny_model}", "eval.every=1", said])
    run = execute(compiled(graph, "apart"), tmp_path / name, pool=workers, export=False)
    assert len(set(run.evaluations.values())) > 1
    assert run.evaluated["eval/same/value"] == run.evaluations
