"""The table of a step's samples says what transformers and the graph's functions say of the same texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.run_config import CheckpointPolicy, RunConfig, SamplePolicy
from hflow.plan.plan_file import load_plan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.samples.files import SampleFiles, read_samples, sample_files
from hflow.runtime.samples.parts import SamplePiece, write_pieces
from tests.runtime.matrix import GRAPHS
from tests.runtime.rewards import digits

GRPO = Path("tests/runtime/grpo_small.yaml")
EVERY = RunConfig(CheckpointPolicy(every=1, keep=9), export="none", samples=SamplePolicy(every=1))
QUESTIONS = [json.loads(line) for line in Path("tests/runtime/sums.jsonl").read_text().splitlines()]


def run_inline(graph: Path, folder: Path, config: RunConfig, *params: str) -> Run:
    plan = hflow.compile(hflow.load(graph, [f"params.{p}" for p in params]), "local1")
    return hflow.execute(plan, run_dir=folder, workers="inline", config=config)


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("samples") / "run"
    return run_inline(GRPO, folder, EVERY, f"model={tiny_model}", "steps=3")


def test_a_row_is_what_was_asked_and_answered(run: Run) -> None:
    table = run.samples(0)
    assert table.num_rows == 64 and table.column("row").to_pylist() == list(range(64))
    for row in table.to_pylist():
        drawn = QUESTIONS[row["data_row"]]
        assert row["prompt"] == f"{drawn['question']}=" and row["prompts.answer"] == drawn["answer"]
        assert (row["step"], row["node"], row["version"]) == (0, "rollout", 0)
        assert row["finish"] == "eos" or (row["finish"], row["length"]) == ("length", 6)
    groups = [table.column("prompt").to_pylist()[i : i + 4] for i in range(0, 64, 4)]
    assert all(len(set(group)) == 1 for group in groups) and len({g[0] for g in groups}) > 8


def test_rewards_and_advantages_are_those_of_the_texts(run: Run) -> None:
    """Advantages by their formula: each reward less its group's mean, over the group's deviation."""
    for step in range(3):
        table = run.samples(step)
        texts, answers = (table.column(n).to_pylist() for n in ("response", "prompts.answer"))
        groups = [texts[i : i + 4] for i in range(0, 64, 4)]
        expected = torch.tensor(digits(groups, answers[::4]))
        found = torch.tensor(table.column("reward").to_pylist()).view(16, 4)
        assert torch.equal(found, expected.float())
        assert table.column("reward.score").equals(table.column("reward"))
        spread = (expected - expected.mean(1, keepdim=True)) / (expected.std(1, keepdim=True) + 1e-6)
        advantages = torch.tensor(table.column("advantage").to_pylist()).view(16, 4)
        assert torch.allclose(advantages, spread.float(), atol=1e-3)
        assert run.metrics[step]["reward_mean"] == pytest.approx(float(expected.mean()), rel=1e-6)


def test_log_probs_are_those_of_transformers(run: Run, tiny_model: Path) -> None:
    """Summed over the response, by the weights before the first step; float32 sums of six tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, torch_dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(tiny_model))
    whole = [r for r in run.samples(0).to_pylist() if r["finish"] == "length" and "<" not in r["response"]]
    checked = 0
    for row in whole:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        response = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        if len(response) != row["length"]:  # a text without its padding tokens
            continue
        tokens = torch.tensor([prompt + response])
        log_probs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = log_probs.gather(1, tokens[0, len(prompt) :, None]).sum()
        assert row["logprob"] == pytest.approx(expected.item(), abs=1e-4)
        checked += 1
    assert checked


def test_lengths_are_those_of_the_metrics(run: Run) -> None:
    for step in range(3):
        lengths = run.samples(step).column("length").to_pylist()
        assert sum(lengths) / 64 == pytest.approx(run.metrics[step]["rollout.response_length"])


@pytest.mark.parametrize("port", [False, True], ids=["unread", "port"])
def test_what_ended_a_response_has_one_word(tiny_model: Path, tmp_path: Path, port: bool) -> None:
    """`kept` stops at two texts, and leaves what is cut by length out of the loss. With and without a reader
    of the port `finish`."""
    more = tmp_path / "more.yaml"
    reads = "seen: {op: call, fn: FUNCTIONS:seen_ends, in: {finish: rollout.finish}}" if port else ""
    more.write_text(f"hflow: 1\nnodes: {{{reads}}}\n".replace("FUNCTIONS", str(GRAPHS / "functions.py")))
    graph = hflow.load(GRAPHS / "kept.yaml", [f"params.model={tiny_model}", "params.steps=1"], [more])
    run = hflow.execute(
        hflow.compile(graph, "local1"), run_dir=tmp_path / "run", workers="inline", config=EVERY
    )
    rows = run.samples(0).to_pylist()
    for row in rows:
        stopped = any(text in row["response"] for text in ("7", "42"))
        assert (row["finish"] == "stop") == stopped
        assert (row["logprob"] is None) == (row["finish"] == "length")
    assert {"stop", "length"} <= {row["finish"] for row in rows} <= {"stop", "length", "eos"}


@pytest.mark.slow
def test_a_run_without_samples_is_the_same_run(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    bare = RunConfig(EVERY.checkpoint, export="none", samples=SamplePolicy(every=0))
    other = run_inline(GRPO, tmp_path / "run", bare, f"model={tiny_model}", "steps=3")
    timed = ("time_s", "tokens_per_s")
    for mine, theirs in zip(run.metrics, other.metrics, strict=True):
        assert mine.keys() == theirs.keys()
        assert [k for k in mine if mine[k] != theirs[k] and not k.startswith(timed)] == []
    assert not (tmp_path / "run/samples").exists() and other.samples().num_rows == 0


def test_the_report_links_to_a_page_of_them(run: Run) -> None:
    assert 'href="samples.html"' in (run.folder / "report.html").read_text()
    page = (run.folder / "samples.html").read_text()
    assert page.count("<summary>") == 3 and "<script" not in page
    assert not (run.folder / "samples/.parts").exists()


@pytest.mark.rotating(6)
def test_steps_after_the_checkpoint_are_sampled_anew(tiny_model: Path, tmp_path: Path) -> None:
    """A run that goes on from step 2 leaves the files of one that was never stopped, byte by byte."""
    params = (f"model={tiny_model}", "steps=4")
    whole = run_inline(GRPO, tmp_path / "whole", EVERY, *params)
    again = run_inline(GRPO, tmp_path / "again", EVERY, *params)
    for step in (3, 4):
        for file in (again.folder / f"checkpoints/step-{step:08d}").iterdir():
            file.unlink()
    (again.folder / "samples/step-000002.parquet").write_bytes(b"damaged")
    (again.folder / "samples/step-000009.parquet").write_bytes(b"of no step")
    (again.folder / "samples/.parts").mkdir()
    plan = hflow.compile(hflow.load(GRPO, [f"params.{p}" for p in params]), "local1")
    execute(plan, again.folder, workers="inline", config=EVERY, resume=True)
    files = {path.name: path.read_bytes() for path in sample_files(whole.folder).values()}
    assert len(files) == 4
    assert {path.name: path.read_bytes() for path in (again.folder / "samples").iterdir()} == files


def tables(run: Run) -> Sequence[pa.Table]:
    return [run.samples(step) for step in sample_files(run.folder)]


def test_two_workers_leave_the_table_of_one(
    run: Run, workers: Pool, tiny_model: Path, tmp_path: Path
) -> None:
    """Rollouts on one mesh, split over two devices; functions and training on others. Texts are equal, and
    numbers up to the order of float sums."""
    graph = hflow.load(GRPO, [f"params.model={tiny_model}", "params.steps=3"])
    pins = ["rollout=dp2@0-1", "ref_logprobs=tp2@2-3", "actor_train=dp2@2-3"]
    split = execute(hflow.compile(graph, "local4", pins), tmp_path / "run", pool=workers, config=EVERY)
    for mine, theirs in zip(tables(split), tables(run), strict=True):
        assert mine.schema == theirs.schema
        for name in mine.column_names:
            one, other = mine.column(name).to_pylist(), theirs.column(name).to_pylist()
            assert one == (pytest.approx(other, abs=1e-4) if isinstance(one[0], float) else other), name


def test_a_region_has_the_samples_that_it_hands_out(tiny_model: Path, tmp_path: Path) -> None:
    run = run_inline(GRAPHS / "region.yaml", tmp_path / "run", EVERY, f"model={tiny_model}", "steps=2")
    table = run.samples(1)
    (node,) = {n.name for n in hflow.load(GRAPHS / "region.yaml").nodes if n.op == "repeat"}
    assert set(table.column("node").to_pylist()) == {node}
    assert table.column("data_row").null_count == table.num_rows  # rows of several rounds
    kept = [name for name in table.column_names if name.startswith(f"{node}.")]
    assert kept and all(table.column(name).null_count == 0 for name in kept)
    assert all(table.column("prompt").to_pylist())


def test_only_so_many_rows_and_bytes_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    config = RunConfig(export="none", samples=SamplePolicy(every=1, rows=10, keep_mb=0.012))
    run = run_inline(GRPO, tmp_path / "run", config, f"model={tiny_model}", "steps=4")
    files = sample_files(run.folder)
    assert max(files) == 3 and 0 < len(files) < 4
    assert sum(file.stat().st_size for file in files.values()) <= 12_000
    assert run.samples(3).num_rows == 10 and run.samples(3).column("prompts.answer").null_count == 0
    everything = read_samples(run.folder)
    assert everything.num_rows == 10 * len(files)
    with pytest.raises(HflowError, match="HF407.*no samples of step 0"):
        run.samples(0)


def test_parts_of_a_later_step_stay_until_they_are_joined(run: Run, tmp_path: Path) -> None:
    """Workers go on while the controller joins what they have left of the step before."""
    files, plan = SampleFiles(tmp_path, SamplePolicy(every=1)), load_plan(run.folder / "plan.json")
    for step in (0, 1):
        request = files.request(step, 3)
        assert request
        pieces = [SamplePiece(0, "prompt", 0, pa.array([f"of step {step}"] * 64))]
        write_pieces(Path(request.folder) / "rank-00000.arrow", pieces)
    for step in (0, 1):
        assert files.collect(plan, step, [0])
        assert set(read_samples(tmp_path, step).column("prompt").to_pylist()) == {f"of step {step}"}


@pytest.mark.slow
def test_the_default_is_every_tenth_step_and_the_last(tiny_model: Path, tmp_path: Path) -> None:
    run = run_inline(GRPO, tmp_path / "run", RunConfig(export="none"), f"model={tiny_model}", "steps=12")
    assert list(sample_files(run.folder)) == [0, 10, 11]
