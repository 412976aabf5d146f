"""`hflow watch`: what is read of a run while it is written, and what is drawn of it."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

import hflow
from hflow.cli.app import app
from hflow.report.watch.frame import frame, sparkline
from hflow.report.watch.growing_file import GrowingFile
from hflow.report.watch.watched_run import WatchedRun
from tests.report.run_folders import run_folder, running, write_json

STEP = {
    "time_s": 2.0,
    "tokens_per_s": 1234.5,
    "reward_mean": 0.5,
    "loss.actor_train": -0.1,
    "time_s.rollout": 1.5,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of 250 steps, three of which are done."""
    run = run_folder(tmp_path / "grpo", **running(os.getpid()), rewards=())
    hflow.compile(hflow.load("grpo", "params.model=shape:qwen2.5-0.5b"), "h100x1").save(run / "plan.json")
    lines = [{"step": step, **STEP, "reward_mean": step / 2} for step in range(3)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    began = {"time": time.time() - 70.0, "event": "started", "plan": "p"}
    events = [began, {"event": "ran", "name": "x"}, *(evaluated(step, step / 10) for step in (0, 2))]
    events.append(
        {"event": "evaluated", "step": 0, "evaluation": "test", "metrics": {"eval/test/pass@1": 0.25}}
    )
    (run / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    write_json(run / "now.json", {"node": "rollout", "since": time.time() - 5.0})
    return run


def evaluated(step: int, value: float) -> dict[str, object]:
    return {"time": 1.0, "event": "evaluated", "step": step, "metric": "reward.score", "value": value}


def looked(run: Path) -> WatchedRun:
    watched = WatchedRun(run)
    watched.look()
    return watched


def test_a_frame_says_where_the_run_is(run: Path) -> None:
    lines = frame(looked(run), 80).plain.splitlines()
    assert lines[0] == "grpo  running  step 3/250"
    assert lines[1].startswith("time     1 min 1") and lines[1].endswith(
        "about 8 min 14 s left"
    )  # 247 of 2 s
    assert re.fullmatch(r"now      rollout, for \d+(\.\d)? s", lines[2])
    assert lines[3].startswith("speed    1,234 tokens/s, 2.0 s a step, ") and "predicted" in lines[3]
    curves = {line[:28].strip(): line[28:].split() for line in lines[5:10]}
    assert curves["eval/test/pass@1"][-1] == "0.25"
    assert curves["held-out reward.score"] == ["▁█", "0.2"] and curves["reward_mean"] == ["▁▅█", "1"]
    (measured,) = (line for line in lines if line.startswith("rollout "))
    assert "1.5 s" in measured


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_frame_is_as_wide_as_the_terminal(run: Path, width: int) -> None:
    assert max(map(cell_len, frame(looked(run), width).plain.splitlines())) <= width


def test_before_the_first_step_the_plan_tells_the_time(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")
    watched = looked(run)
    assert watched.plan
    text = frame(watched, 80).plain
    assert "no step has ended yet" in text and "left" in text


def test_half_a_line_is_no_line_until_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    growing = GrowingFile(file)
    assert list(growing.new_lines()) == []
    whole = "".join(
        json.dumps({"step": n, "text": "ü" * n}, ensure_ascii=False) + "\n" for n in range(9)
    ).encode()
    found = []
    with file.open("wb", buffering=0) as written:
        for at in range(0, len(whole), 7):
            written.write(whole[at : at + 7])
            found += list(growing.new_lines())
    assert [line["step"] for line in found] == list(range(9)) and found[5]["text"] == "üüüüü"
    file.write_bytes(b'{"step": 1}\nnonsense\n[1]\n{"step": 2}\n{"st')
    assert [line["step"] for line in growing.new_lines()] == [1, 2] and growing.is_anew


def test_steps_that_are_made_again_count_once(run: Path) -> None:
    """As `hflow exec --resume` leaves the files: metrics are another file, events go on."""
    watched = looked(run)
    (run / "new").write_text(json.dumps({"step": 0, **STEP}) + "\n")
    (run / "new").replace(run / "metrics.jsonl")
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"time": time.time(), "event": "resumed", "step": 1}) + "\n")
    watched.look()
    assert [line["step"] for line in watched.metrics] == [0]
    assert (
        watched.evaluations == {"held-out reward.score": {0: 0.0}, "eval/test/pass@1": {0: 0.25}}
        and watched.looked - watched.began < 60
    )


def test_a_plan_that_cannot_be_read_leaves_the_rest(run: Path) -> None:
    (run / "plan.json").write_text('{"version": 99')
    text = frame(looked(run), 80).plain
    assert text.startswith("grpo  running  step 3\n") and "reward_mean" in text


def test_names_of_runs_are_not_obeyed(run: Path) -> None:
    renamed = run.rename(run.with_name("a\x1b[31m[bold]b"))
    assert frame(looked(renamed), 80).plain.startswith("a\\x1b[31m[bold]b  running")


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([], 5, ""),
        ([1.0], 5, "▅"),
        ([0.0, 7.0], 5, "▁█"),
        ([float(n) for n in range(8)], 8, "▁▂▃▄▅▆▇█"),
        ([0.0, float("nan"), 1.0], 3, "▁ █"),
        ([0.0, 0.0, 4.0, 8.0], 2, "▁█"),
        ([float("inf"), 1.0], 5, " ▅"),
    ],
)
def test_sparklines(values: list[float], width: int, bars: str) -> None:
    assert sparkline(values, width) == bars


def test_the_command_ends_with_the_run(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    once = CliRunner().invoke(app, ["watch", str(run), "--once"])
    assert once.exit_code == 0 and "step 3/250" in once.stdout
    write_json(run / "summary.json", summary | {"status": "failed"})
    ended = CliRunner().invoke(app, ["watch", str(run)])
    assert ended.exit_code == 0 and "failed" in ended.stdout


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert "HF407" in str(found.exception)
