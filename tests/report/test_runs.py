"""What `hflow runs` tells of the folders of runs: whole ones, damaged ones, and what is none."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hflow.report.runs import ListedRun, list_runs
from hflow.report.runs_text import runs_json, runs_text
from tests.limits import memory_limited_to
from tests.report.run_folders import checkpoint, run_folder, running, write_json

HFLOW = [sys.executable, "-m", "hflow.cli.app", "runs"]
DAY_S = 86_400


@pytest.fixture
def ended() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def only(folder: Path) -> ListedRun:
    (run,) = list_runs(folder)
    return run


def test_a_finished_run(tmp_path: Path) -> None:
    evaluations = {"before": 0.1, "after": 0.6, "by_step": {"0": 0.1, "10": 0.75, "20": 0.6}}
    folder = run_folder(tmp_path / "grpo", checkpoints=[200, 30], eval=evaluations, began=1000.0)
    run = only(tmp_path)
    assert (run.path, run.name, run.status) == (folder, "grpo", "finished")
    assert (run.steps, run.planned_steps, run.began) == (2, 20, 1000.0)
    assert (run.best, run.best_of) == (0.75, "eval")
    assert run.checkpoints == (30, 200)


def test_without_evaluation_the_best_reward_is_told(tmp_path: Path) -> None:
    run_folder(tmp_path / "a", rewards=[0.25, 0.5, None, float("nan"), 0.375], eval=None)
    run_folder(tmp_path / "b", rewards=[])
    best = {run.name: (run.best, run.best_of) for run in list_runs(tmp_path)}
    assert best == {"a": (0.5, "reward_mean"), "b": (None, "")}


SCORED = {"by_step": {"0": 0.5, "10": 0.25, "20": 0.75}}
BY_COLUMN = "run:\n  checkpoint: {every: 1, best: loss.actor_train, mode: min}\n"


@pytest.mark.parametrize(
    ("config", "best"),
    [
        (BY_COLUMN, (-0.5, "loss.actor_train")),
        (BY_COLUMN.replace("min", "max"), (0.125, "loss.actor_train")),
        ("run:\n  checkpoint: {every: 1, best: reward.score}\n", (0.75, "reward.score")),
        ("run:\n  checkpoint: {every: 1, best: eval/test/pass@1, mode: min}\n", (0.25, "eval/test/pass@1")),
        ("run:\n  checkpoint: {every: 1, best: reward.other}\n", (None, "")),
        ("run:\n  checkpoint: {best: [\n", (0.75, "eval")),
        ("run:\n  export: none\n", (0.75, "eval")),
    ],
    ids=["least of a column", "greatest of a column", "eval", "named", "unknown", "damaged", "none named"],
)
def test_the_best_is_by_the_metric_that_chooses_checkpoints(
    config: str, best: tuple[float | None, str], tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "run", eval=SCORED, evaluations={"eval/test/pass@1": SCORED})
    (folder / "run.yaml").write_text(config)
    plan = json.loads((folder / "plan.json").read_text())
    plan["step"]["graph"]["evaluation"] = {"metric": {"node": "reward", "port": "score"}, "rows": 4}
    write_json(folder / "plan.json", plan)
    losses = [0.125, -0.5, None]
    lines = [{"step": n, "reward_mean": 0.9, "loss.actor_train": loss} for n, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert (only(tmp_path).best, only(tmp_path).best_of) == best


def test_runs_come_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    for name, began in [("a", 30.0), ("b", 10.0), ("d", 20.0), ("c", 20.0)]:
        run_folder(tmp_path / name, began=began)
    assert [run.name for run in list_runs(tmp_path)] == ["b", "c", "d", "a"]


def test_what_is_no_run_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for missing in ("events.jsonl", "plan.json"):
        (run_folder(tmp_path / f"without-{missing}") / missing).unlink()
    (run_folder(tmp_path / "folder") / "plan.json").unlink()
    (tmp_path / "folder" / "plan.json").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert list_runs(tmp_path) == []


def test_a_running_run_is_that_of_a_living_process(tmp_path: Path, ended: int) -> None:
    run_folder(tmp_path / "alive", **running(os.getpid()))
    run_folder(tmp_path / "died", **running(ended))
    run_folder(tmp_path / "elsewhere", **running(ended, "another"))
    status = {run.name: run.status for run in list_runs(tmp_path)}
    assert status == {"alive": "running", "died": "died", "elsewhere": "running"}


def test_a_process_that_waits_to_be_noticed_is_dead(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    run_folder(tmp_path / "run", **running(process.pid))
    assert only(tmp_path).status == "died"
    process.wait()


def test_a_process_that_got_the_number_later_is_another(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", **running(os.getpid()))
    before = time.time() - 30 * DAY_S
    os.utime(folder / "summary.json", (before, before))
    assert only(tmp_path).status == "died"


def test_steps_are_those_in_the_metrics(tmp_path: Path) -> None:
    """The summary of a run that goes on has none yet; the last line of one that was killed may be a part."""
    folder = run_folder(tmp_path / "run", **running(os.getpid()), steps=0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward_mean": 0.9, "tok')
    assert (only(tmp_path).steps, only(tmp_path).best) == (2, 0.5)
    resumed = run_folder(tmp_path / "resumed", rewards=[])
    (resumed / "metrics.jsonl").write_text('{"step": 7}\n')
    assert {run.name: run.steps for run in list_runs(tmp_path)} == {"run": 2, "resumed": 8}


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", checkpoints=[7])
    (checkpoint(folder, 9) / "manifest.json").unlink()
    (folder / "checkpoints" / "step-11").symlink_to(folder / "checkpoints" / "step-7")
    (folder / "checkpoints" / ".step-8-x").mkdir()
    (folder / "checkpoints" / "step-12").write_text("")
    assert only(tmp_path).checkpoints == (7,)


def test_size_is_what_would_be_free(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "run")
    before = only(tmp_path / "runs").size_bytes
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(10_000_000))
    (folder / "link").symlink_to(outside)
    (folder / "links").symlink_to(tmp_path)
    (folder / "export").mkdir()
    (folder / "export" / "weights").write_bytes(os.urandom(1_000_000))
    os.link(folder / "export" / "weights", folder / "export" / "again")
    os.sync()
    assert 1_000_000 <= only(tmp_path / "runs").size_bytes - before < 1_100_000


SUMMARIES: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "cut": b'{"status": "fini',
    "list": b"[]",
    "bytes": b"\xff\x00",
    "status": b'{"status": "dancing"}',
    "number": b'{"status": 3}',
    "steps": b'{"status": "finished", "steps": -1}',
    "pid": b'{"status": "running", "pid": 0}',
    "huge pid": b'{"status": "running", "pid": 1e30}',
    "by_step": b'{"status": "finished", "eval": {"by_step": {"a": 1}}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", SUMMARIES.values(), ids=SUMMARIES.keys())
def test_a_damaged_summary_is_told(content: bytes | None, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "summary.json").unlink()
    if content is not None:
        (folder / "summary.json").write_bytes(content)
    run = only(tmp_path)
    assert (run.status, run.steps, run.planned_steps) == ("unreadable", 2, 20)
    assert "unreadable" in runs_text([run], time.time())


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00\n", b"[]\n3\n{}\n", b"[" * 100_000], ids=range(4))
def test_other_damage_leaves_gaps(name: str, content: bytes, tmp_path: Path) -> None:
    (run_folder(tmp_path / "run", steps=5) / name).write_bytes(content)
    run = only(tmp_path)
    lost = (2, None) if name == "plan.json" else (5, 20)
    assert (run.status, run.steps, run.planned_steps) == ("finished", *lost)
    assert runs_text([run], time.time()) and json.loads(runs_json([run]))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "huge"])
@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "plan.json", "events.jsonl"])
def test_what_may_not_be_read_to_its_end(name: str, kind: str, tmp_path: Path) -> None:
    file = run_folder(tmp_path / "run") / name
    file.unlink()
    match kind:
        case "device":
            file.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case _:
            with file.open("wb") as out:
                out.truncate(2**40)
    with memory_limited_to(2**29):
        found = list_runs(tmp_path)
    if name in ("plan.json", "events.jsonl") and kind != "huge":
        assert found == []
    else:
        assert [run.name for run in found] == ["run"]


def test_the_table_holds_whole_names_that_no_terminal_obeys(tmp_path: Path) -> None:
    now = 100 * DAY_S
    run_folder(tmp_path / ("long-" * 40), checkpoints=[1, 5], began=now - 3.5 * DAY_S)
    run_folder(tmp_path / "red\x1b[31m\n\udcff", "failed", began=now - 90)
    (tmp_path / "red\x1b[31m\n\udcff" / "plan.json").write_text("{}")
    os.utime(tmp_path / "red\x1b[31m\n\udcff" / "plan.json", (now - 90, now - 90))
    head, first, second = runs_text(list_runs(tmp_path), now).splitlines()
    assert head.split() == ["run", "status", "steps", "best", "of", "checkpoints", "size", "age"]
    assert first.startswith("long-" * 40) and first.endswith("  3 days")
    assert "  2, step 5  " in first and "  2/20   0.5  reward_mean" in first
    assert r"red\x1b[31m\n\udcff" in second and "  2/?  " in second and second.endswith("  1 min 30 s")
    second.encode()


def hflow_runs(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    return subprocess.run([*HFLOW, *arguments], capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    nothing = hflow_runs(tmp_path)
    assert (nothing.returncode, nothing.stdout) == (0, "no runs in `runs`\n")
    missing = hflow_runs(tmp_path, "--dir", "elsewhere", "--json")
    assert missing.returncode == 1
    assert missing.stderr.strip() == "error[HF407]: cannot list `elsewhere`: No such file or directory"
    run_folder(tmp_path / "runs" / "a", checkpoints=[3])
    table = hflow_runs(tmp_path)
    assert table.returncode == 0 and table.stdout.splitlines()[1].startswith("a ")
    (found,) = json.loads(hflow_runs(tmp_path, "--json").stdout)
    assert found["path"] == "runs/a" and found["checkpoints"] == [3] and found["status"] == "finished"
    both = hflow_runs(tmp_path, "--json", "rm", "a")
    assert both.returncode == 2 and (tmp_path / "runs" / "a").exists()
    removed = hflow_runs(tmp_path, "rm", "a@3", "a")
    assert removed.returncode == 0 and removed.stdout.startswith(f"removed  {tmp_path / 'runs' / 'a'}  ")
    assert hflow_runs(tmp_path, "--json").stdout == "[]\n"


@pytest.mark.slow
def test_listing_starts_light() -> None:
    code = "import sys, hflow.report.runs_text, hflow.report.remove_runs; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_run_that_goes_away_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run", **running(os.getpid()))
    monkeypatch.setattr(socket, "gethostname", lambda: shutil.rmtree(folder) or socket_host)
    socket_host = json.loads((folder / "summary.json").read_text())["host"]
    assert only(tmp_path).size_bytes == 0


def test_a_summary_of_a_later_hflow(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    write_json(folder / "summary.json", summary | {"resumed_from": {"step": 3}, "wall_s": None})
    assert only(tmp_path).status == "finished"
