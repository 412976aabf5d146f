"""benchmarks/published.py: rows and summaries; docs/predictions.md is made of its result."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import linear_regression
from typing import Any

import pytest

from benchmarks.publications.predictions import NEMO_RL_WAKE, PREDICT, predicted
from benchmarks.publications.rows import Prediction, Row, published_rows
from benchmarks.publications.tables import report, spread, tables, with_tables
from benchmarks.published import PAGE
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import num_parameters

ROOT = Path(__file__).parent.parent


def newest() -> dict[str, Any]:
    """Results are named by date, so the last one is the newest."""
    return json.loads(max((ROOT / "benchmarks/results").glob("published-*.json")).read_text())


def row(
    figure: float, system: str = "a", kind: str = "training", fitted: bool = False, lacks: str = ""
) -> Row:
    return Row(system, "m", "H100-80", 8, kind, "x=1", figure, "tokens/s", fitted, lacks, "https://x.org")


def off(error: float | None, **of_row: Any) -> Prediction:
    """A prediction of 100 that is off by so much."""
    return Prediction(
        row(100.0, **of_row), None if error is None else 100.0 * (1 + error), "" if error else "why"
    )


def test_the_page_is_made_of_the_newest_result() -> None:
    page = PAGE.read_text()
    assert with_tables(page, tables(newest())) == page


def test_the_result_has_every_row_with_its_figure_and_no_other() -> None:
    keys = ("kind", "system", "model", "gpu", "gpus", "setting", "unit", "figure", "source")
    told = Counter(tuple(r[key] for key in keys) for r in newest()["rows"])
    assert told == Counter(tuple(getattr(r, key) for key in keys) for r in published_rows())
    assert all(("predicted" in r) != bool(r.get("reason")) for r in newest()["rows"])


def test_every_row_has_a_source_a_unit_and_a_kind_that_is_predicted() -> None:
    for each in published_rows():
        assert each.source.startswith("https://") or "docs.nvidia.com" in each.source, each
        assert each.figure > 0 and each.unit in ("tokens/s", "tokens/s/GPU", "s") and each.kind in PREDICT
    assert (
        max(Counter((r.system, r.model, r.gpu, r.gpus, r.kind, r.setting) for r in published_rows()).values())
        == 1
    )


def of(name: str) -> list[dict[str, str]]:
    lines = (ROOT / f"benchmarks/data/{name}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def test_fitted_rows_are_every_second_one_of_two_files_and_those_of_four_models() -> None:
    """The rule of benchmarks/cost_model.py; figures must be the same in both places. One model of NeMo-RL
    says what the host of its engine takes, it and two more how servers wake, one of Megatron-Bridge what
    layers with experts do beside products."""
    expected = {
        (
            f"MPT-{r['model_params_b']}B",
            r["gpu"],
            int(r["gpus"]),
            r["seq_len"],
            float(r["tokens_per_s_per_gpu"]),
        )
        for r in of("training")[::2]
    }
    found = [r for r in published_rows() if r.fitted]
    trained = {
        (r.model, r.gpu, r.gpus, r.said["seq_len"], r.figure)
        for r in found
        if r.kind == "training" and r.system == "llm-foundry"
    }
    assert trained == expected and len(expected) == 5
    lengths = ("batch", "prompt", "response")
    made = {
        (r.model, r.gpus, *(r.said[k] for k in lengths), r.figure) for r in found if r.kind == "generation"
    }
    assert made == {
        (
            f"llama-{r['model'].lower()}",
            int(r["tp"]),
            *(r[k] for k in ("batch", "input_len", "output_len")),
            float(r["output_tokens_per_s"]),
        )
        for r in of("generation")[::2]
    }
    steps = [r for r in found if r.system == "NeMo-RL 0.3"]
    assert {r.model for r in steps} == {"llama-3.1-8b"} and len(steps) == 10
    waking = [r for r in found if r.system == "NeMo-RL 2026-07"]
    assert {(r.model, r.kind) for r in waking} == {
        ("qwen3-30b-a3b", "GRPO weights"),
        ("qwen3-235b-a22b", "GRPO weights"),
    }
    experts = [r for r in found if r.system.startswith("Megatron-Bridge")]
    assert {r.model for r in experts} == {"gpt-oss-120b"} and len(experts) == 5
    assert len(found) == len(trained) + len(made) + len(steps) + len(waking) + len(experts)


def test_servers_wake_along_a_line_through_the_fitted_rows() -> None:
    """Least squares in seconds, over the bytes of whole models in bf16."""
    rows = [r for r in published_rows() if r.fitted and r.kind == "GRPO weights"]
    sizes = [2.0 * num_parameters(NAMED_SHAPES[r.model]) for r in rows]
    slope, constant = linear_regression(sizes, [r.figure for r in rows])
    assert pytest.approx((1 / slope, constant), rel=0.01) == (NEMO_RL_WAKE.bandwidth, NEMO_RL_WAKE.latency_s)


def test_summaries_are_medians_and_percentiles_by_hand() -> None:
    """Errors of 5, 10, 20, 30 and 90 %: median 20 %, and four of five are within 30 %. Of 10 and 40 %: 25 %,
    and 80 % of two rows are both."""
    assert spread([off(e) for e in (-0.3, 0.05, 0.9, -0.1, 0.2)]) == {
        "rows": 5, "not_predicted": 0, "median": 0.2, "p80": 0.3,
    }  # fmt: skip
    assert spread([off(0.1), off(None), off(-0.4)]) == {
        "rows": 2, "not_predicted": 1, "median": 0.25, "p80": 0.4,
    }  # fmt: skip
    assert spread([off(None)]) == {"rows": 0, "not_predicted": 1, "median": None, "p80": None}


def test_summaries_keep_fitted_and_held_out_rows_apart() -> None:
    found = [
        off(0.02, fitted=True),
        off(0.3),
        off(-0.5, system="b"),
        off(0.1, kind="generation"),
        off(None, kind="generation"),
    ]
    told = [tuple(s.values()) for s in report(found)["summaries"]]
    assert told == [
        ("training", "all", "fitted", 1, 0, 0.02, 0.02),
        ("training", "all", "held out", 2, 0, 0.4, 0.5),
        ("training", "a", "fitted", 1, 0, 0.02, 0.02),
        ("training", "a", "held out", 1, 0, 0.3, 0.3),
        ("training", "b", "held out", 1, 0, 0.5, 0.5),
        ("generation", "a", "held out", 1, 1, 0.1, 0.1),
    ]


def test_the_worst_comes_first_and_what_is_not_predicted_says_why() -> None:
    result = report([off(0.1), off(None), off(-0.6), off(0.4)])
    assert [r.get("error") for r in result["rows"]] == [-0.6, 0.4, 0.1, None]
    made = tables(result)
    assert made.index("-60.0%") < made.index("+40.0%") < made.index("+10.0%")
    assert "| training | a | m | 8 H100-80 | x=1 | 100 tokens/s | why |" in made


def test_what_hflow_lacks_is_not_predicted() -> None:
    found = predicted(row(1.0, lacks="FP8"))
    assert found.predicted is None and found.reason == "hflow has no FP8"


@pytest.mark.parametrize("kind", PREDICT)
def test_predictions_are_of_the_right_size(kind: str) -> None:
    """Of each kind the row that is predicted best in the result: a wrong unit, cluster or number of rows puts
    it off by more than a half."""
    best = min(
        (r for r in newest()["rows"] if r["kind"] == kind and "error" in r), key=lambda r: abs(r["error"])
    )
    (found,) = (
        predicted(r)
        for r in published_rows()
        if all(getattr(r, k) == best[k] for k in ("kind", "system", "model", "gpu", "gpus", "setting"))
    )
    assert found.error is not None and abs(found.error) < 0.5


def test_layouts_that_cannot_be_are_told_with_their_reason() -> None:
    """Qwen3-235B has 64 heads."""
    (large, *_) = (r for r in published_rows() if r.model == "qwen3-235b-a22b" and r.gpus == 128)
    too_wide = replace(large, setting=large.setting.replace("generate=dp8,tp16", "generate=dp1,tp128"))
    assert "tp128 does not divide 64 heads" in predicted(too_wide).reason
    assert not predicted(large).reason
