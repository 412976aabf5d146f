"""Files on a disk that becomes full, by the limit of a file's size, which needs no root: the system then
refuses bytes in the same places."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.runtime.controller.line_file import LineFile
from hflow.runtime.controller.run_folder import RunFolder
from hflow.runtime.tools.new_model import new_model
from hflow.whole_file import write_whole
from tests.runtime.test_failures import DEADLINE_S, HFLOW

FOLDER = Path(__file__).parent
GRAPH = FOLDER / "grpo_small.yaml"
RUN_BYTES = 45_000  # holds a plan and the reserve, and the events of some fifty steps


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (RUN_BYTES, RUN_BYTES))


def run(model: Path, run_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    graph = [str(GRAPH), "--set", f"params.model={model}", "--run-dir", str(run_dir)]
    command = [*HFLOW, "exec", *graph, "--cluster", "local1", "--workers", "inline", *more]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # more spin while other tests compute
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, preexec_fn=limit_files, env=one_thread
    )


def test_a_line_is_whole_or_absent(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines.jsonl")
    file.append({"step": 0})
    with largest_file(20), pytest.raises(HflowError, match="HF407.*lines.jsonl.*File too large .* MB free"):
        file.append({"step": 1})
    assert file.path.read_text() == '{"step": 0}\n'
    file.append({"step": 2})
    file.close()
    assert file.path.read_text() == '{"step": 0}\n{"step": 2}\n'


def test_the_former_content_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_whole(path, "former")
    path.chmod(0o640)
    with largest_file(20), pytest.raises(HflowError, match="HF001.*file.txt.*File too large"):
        write_whole(path, 100 * "x")
    assert path.read_text() == "former" and list(path.parent.iterdir()) == [path]
    link = tmp_path / "link"
    link.symlink_to(path)
    write_whole(link, "latter")
    assert path.read_text() == "latter" and path.stat().st_mode & 0o777 == 0o640 and link.is_symlink()


def test_a_device_is_written_to_and_stays_one() -> None:
    write_whole(Path("/dev/null"), "text")
    with pytest.raises(HflowError, match="/dev/full.*No space left on device"):
        write_whole(Path("/dev/full"), "text")
    assert Path("/dev/null").is_char_device() and Path("/dev/full").is_char_device()


@pytest.mark.parametrize("command", [("schema",), ("check", "algorithms/grpo.yaml")])
def test_full_standard_output_is_a_diagnostic(command: tuple[str, ...]) -> None:
    """More than Python's buffer holds, and less."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*HFLOW, *command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == "error[HF001]: cannot write to standard output: No space left on device"


def test_a_plan_and_its_pages_are_whole_or_absent(tiny_model: Path, tmp_path: Path) -> None:
    plan = hflow.compile(hflow.load(GRAPH, [f"params.model={tiny_model}"]), "clusters/local1.yaml")
    with largest_file(1000), pytest.raises(HflowError, match="HF306.*plan.json.*File too large"):
        plan.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_a_new_model_is_whole_or_absent(tmp_path: Path) -> None:
    with largest_file(5000), pytest.raises(HflowError, match="HF406.*model.*File too large"):
        new_model(tmp_path / "model", layers=1, hidden=16, heads=2)
    assert not list(tmp_path.iterdir())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes").write_text("mine")
    new_model(tmp_path / "model", layers=1, hidden=16, heads=2, force=True)
    assert {"notes", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (tmp_path / "model").iterdir()
    }
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_a_run_ends_with_one_diagnostic_and_whole_lines(tiny_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = run(tiny_model, run_dir, "--set", "params.steps=500")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("error[") == 1 and f"error[HF407]: cannot write `{run_dir}/" in done.stderr
    for name in ("events.jsonl", "metrics.jsonl"):
        text = (run_dir / name).read_text()
        assert text.endswith("\n") and all(json.loads(line) for line in text.splitlines())
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = (run_dir / "metrics.jsonl").read_text().count("\n")
    assert summary["status"] == "failed" and summary["steps"] == steps > 0
    assert "HF407" in (run_dir / "error.txt").read_text()
    assert not [p.name for p in run_dir.iterdir() if p.name.startswith(".")]


@pytest.mark.slow
def test_an_export_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "run"
    new_model(model, layers=2, hidden=64, max_positions=64)
    done = run(model, run_dir, "--set", "params.steps=1")
    assert done.returncode == 1 and done.stderr.count("error[HF406]") == 1, done.stderr
    assert "File too large" in done.stderr and not list((run_dir / "export").iterdir())


def test_a_folder_in_which_no_run_began_can_be_given_again(tiny_model: Path, tmp_path: Path) -> None:
    plan = hflow.compile(hflow.load(GRAPH, [f"params.model={tiny_model}"]), "clusters/local1.yaml")
    with largest_file(1000), pytest.raises(HflowError, match="HF407.*File too large"):
        RunFolder(tmp_path / "run", plan)
    RunFolder(tmp_path / "run", plan).close("finished", "")


def test_runs_of_one_second_have_folders_of_their_own(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = hflow.compile(hflow.load(GRAPH, [f"params.model={tiny_model}"]), "clusters/local1.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda _: RunFolder(None, plan), range(8)))
    names = {"grpo_small-now", *(f"grpo_small-now-{number}" for number in range(2, 9))}
    assert {folder.path.name for folder in folders} == names
    for folder in folders:
        folder.close("finished", "")


def test_one_folder_is_given_to_one_run(tiny_model: Path, tmp_path: Path) -> None:
    """Also to runs that start at once, of which each finds it empty."""
    plan = hflow.compile(hflow.load(GRAPH, [f"params.model={tiny_model}"]), "clusters/local1.yaml")

    def attempt(_: int) -> RunFolder | None:
        try:
            return RunFolder(tmp_path / "run", plan)
        except HflowError as error:
            assert error.diagnostics[0].code == "HF407"
            return None

    with ThreadPoolExecutor(8) as threads:
        folders = [folder for folder in threads.map(attempt, range(8)) if folder]
    assert len(folders) == 1
    folders[0].close("finished", "")


@pytest.mark.slow
def test_a_function_that_ends_the_process_leaves_a_running_summary(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing can be done in a process that leaves at once; the folder does not say that it has finished."""
    (tmp_path / "rewards.py").write_text(
        "import os\n\nfrom hflow.ops.op import op\n\n\n"
        '@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")\n'
        "def digits(text, answer):\n    os._exit(0)\n"
    )
    graph = tmp_path / "graph.yaml"
    graph.write_text(GRAPH.read_text())
    command = [*HFLOW, "exec", str(graph), "--set", f"params.model={tiny_model}", "--cluster", "local1"]
    process = subprocess.Popen([*command, "--workers", "inline", "--run-dir", str(tmp_path / "run")])
    assert process.wait(DEADLINE_S) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "running" and summary["pid"] == process.pid
    assert summary["host"] == os.uname().nodename and not Path(f"/proc/{process.pid}").exists()
