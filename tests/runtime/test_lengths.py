"""What runs say of the lengths that they saw, beside the samples that they kept; and plans made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import hflow
from hflow.graph.lengths_file import FILE, read_lengths
from hflow.graph.run_config import RunConfig, SamplePolicy
from hflow.plan.plan import Plan
from hflow.plan.row_lengths import row_lengths
from hflow.runtime.controller.pool import Pool

GRPO, REGION = Path("tests/runtime/grpo_small.yaml"), Path("tests/runtime/graphs/region.yaml")
EVERY_STEP = RunConfig(samples=SamplePolicy(every=1))


def planned(graph: Path, model: Path, *overrides: str, cluster: str = "local1") -> Plan:
    return hflow.compile(hflow.load(graph, [f"params.model={model}", "params.steps=1", *overrides]), cluster)


def sampled(run: Path) -> Counter[int]:
    """Lengths of the responses in the samples of all steps."""
    files = sorted((run / "samples").glob("*.parquet"))
    return Counter(length for file in files for length in pq.read_table(file)["length"].to_pylist())


def check(run: Path, rows: int) -> None:
    seen, counts = read_lengths(run), sampled(run)
    lengths = np.array(sorted(counts.elements()))
    own = seen["rollout"]
    assert own.rows == len(lengths) == rows
    assert own.lengths.mean == pytest.approx(lengths.mean()) and 1 < lengths.mean() < 6
    for key, tokens in own.lengths.quantiles:
        assert tokens == np.quantile(lengths, float(key[1:]) / 100, method="inverted_cdf")
    assert own.lengths.greatest == 6 and seen["prompts"].lengths.greatest == 8
    assert seen["prompts"].rows == rows // 4


@pytest.mark.slow
def test_a_run_says_what_it_saw_and_a_plan_takes_it(tiny_model: Path, tmp_path: Path) -> None:
    said = Console(record=True, width=100)
    plan = planned(GRPO, tiny_model, "nodes.rollout.lengths.mean=2")
    hflow.execute(
        plan, workers="inline", run_dir=tmp_path / "a", export=False, config=EVERY_STEP, console=said
    )
    check(tmp_path / "a", rows=64)
    (line,) = (line for line in said.export_text().splitlines() if line.startswith("responses of rollout"))
    own = read_lengths(tmp_path / "a")["rollout"].lengths
    assert line.split()[3:5] == ["2", f"{own.mean:.3g}"], "planned beside seen"

    again = planned(
        GRPO, tiny_model, *(f"nodes.{n}.lengths.from={tmp_path / 'a'}" for n in ("rollout", "prompts"))
    )
    assert again.graph.node("rollout").lengths == own
    assert row_lengths(again.graph, again.graph.node("actor_train")).responses == own
    assert again.tokens_per_step < planned(GRPO, tiny_model).tokens_per_step
    command = [sys.executable, "-m", "hflow.cli.app", "compile", "--from", str(tmp_path / "a"), "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert told["step_time_s"] == again.step_time_s and told["hash"] == again.hash
    hflow.execute(again, workers="inline", run_dir=tmp_path / "b", export=False, config=EVERY_STEP)
    assert sampled(tmp_path / "b") == sampled(tmp_path / "a"), "no token depends on what is stated"
    assert (tmp_path / "b" / FILE).read_text() == (tmp_path / "a" / FILE).read_text()


def test_lengths_of_all_replicas_are_counted_once(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    plan = planned(GRPO, tiny_model, cluster="local4")
    hflow.execute(plan, pool=workers, run_dir=tmp_path / "run", export=False, config=EVERY_STEP)
    check(tmp_path / "run", rows=64)


@pytest.mark.slow
def test_in_a_region_all_rounds_count(tiny_model: Path, tmp_path: Path) -> None:
    plan = planned(REGION, tiny_model, "nodes.sampling.nodes.rollout.lengths.mean=3")
    run = hflow.execute(plan, workers="inline", run_dir=tmp_path / "run", export=False)
    rounds = sum(line["sampling.rounds"] for line in run.metrics)
    assert read_lengths(tmp_path / "run")["rollout"].rows == rounds * 12
    rollout, train = plan.graph.node("rollout"), plan.graph.node("actor_train")
    assert row_lengths(plan.graph, train).responses == rollout.lengths, "handed out by the region"
