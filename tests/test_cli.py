"""The command line: its flags are frozen, its output is for people and programs, it starts light."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typer

import hflow as package
from hflow.cli.app import app
from hflow.cli.plan_commands import AfterPass
from hflow.compiler.compile import PASSES
from hflow.graph.load import load
from hflow.graph.run_config import CheckpointPolicy, RunConfig
from hflow.graph.run_file import read_run_config
from hflow.plan.plan import VERSION
from hflow.plan.plan_file import load_plan

REWARD = """
from hflow.ops.op import op


@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def same(text, answer):
    return [[float(one == want) for one in texts] for texts, want in zip(text, answer)]
"""
HFLOW = [sys.executable, "-m", "hflow.cli.app"]
FLAGS = {
    "check": ["graph", "-f", "--file", "--set", "--json"],
    "show": [
        "graph", "-f", "--file", "--set", "--resolved", "--ir", "--python", "--svg", "--prompts", "--from",
        "--to",
    ],
    "fmt": ["files", "--check"],
    "schema": [],
    "new": ["name", "--from", "--force"],
    "compile": [
        "graph", "--cluster", "--pin", "--engine", "-f", "--file", "--set", "-o", "--output", "--json",
        "--html", "--trace", "--ascii", "--placement", "--planner", "--budget", "--from", "--diff",
        "--explain", "--efficiency", "--sensitivities", "--what-if", "--print-after",
    ],
    "sweep": [
        "graph", "--clusters", "--pin", "--engine", "-f", "--file", "--set", "--placement", "--planner",
        "--budget", "--json", "--csv", "--ascii",
    ],
    "explain": ["plan", "--analyze", "--html", "--trace", "--json", "--ascii"],
    "exec": [
        "graph", "--cluster", "--pin", "--engine", "-f", "--file", "--set", "--run-dir", "--address",
        "--workers", "--resume", "--allow",
    ],
    "runs": ["--dir", "--json"],
    "export": ["run", "--model", "--to", "--dir"],
    "runs rm": ["names", "--dir", "--force"],
    "samples": ["run", "--step", "--sort", "--grep", "--limit", "--json", "--dir"],
    "watch": ["run", "--once", "--dir"],
    "calibrate": ["-o", "--output", "--workers", "--force"],
    "doctor": ["--json", "--no-start"],
    "new-model": [
        "folder", "--family", "--layers", "--hidden", "--heads", "--kv-heads", "--ffn", "--alphabet",
        "--experts", "--max-positions", "--tied", "--no-tied", "--head", "--chat-template", "--seed",
        "--force", "--no-force",
    ],
}  # fmt: skip


def hflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HFLOW, *arguments], capture_output=True, text=True, timeout=120)


def test_flags_are_reviewed() -> None:
    """A new flag is a promise: add it here on purpose."""
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for group, inner in [(n, c.commands) for n, c in commands.items() if hasattr(c, "commands")]:
        commands |= {f"{group} {name}": command for name, command in inner.items()}
    found = {
        name: [o for p in command.params for o in (*p.opts, *p.secondary_opts) if o != "--help"]
        for name, command in commands.items()
    }
    assert found == FLAGS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    done = hflow("new-model", str(folder), "--layers", "2", "--hidden", "32", "--seed", "1")
    assert done.returncode == 0 and "parameters" in done.stdout
    return str(folder)


def test_compile_json_has_the_promised_keys(model: str, tmp_path: Path) -> None:
    done = hflow(
        "compile", "algorithms/grpo.yaml", "--set", f"params.model={model}", "--json",
        "--pin", "actor_train=tp2", "-o", str(tmp_path / "plan.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan.keys() >= {
        "hash", "graph", "cluster", "step_time_s", "step_interval_s", "tokens_per_s", "search", "nodes",
        "edges", "memory", "hosts", "placement", "path", "idle",
    }  # fmt: skip
    assert plan["search"].keys() == {
        "seconds", "gap", "explored", "bound_s", "planner", "unsearched", "tried_engines", "pinned",
        "tried_sharing",
    }  # fmt: skip
    train = next(n for n in plan["nodes"] if n["name"] == "actor_train")
    assert train["layout"] == {"pp": 1, "tp": 2, "dp": 1, "cp": 1} and train["devices"] == [0, 1]
    assert train.keys() >= {
        "micro_batch",
        "start_s",
        "time_s",
        "time_interval_s",
        "memory_bytes",
        "zero",
        "recompute",
        "ep",
        "offload",
    }
    assert {m for group in plan["placement"] for m in group["models"]} == {"actor", "ref"}
    assert plan["path"][-1] == "actor_train" and all(0 <= i["part"] <= 1 for i in plan["idle"])
    for edge in plan["edges"]:
        assert edge["bytes_per_device"] == edge["lower_bound_bytes_per_device"]
    assert all(m["peak_bytes"] <= m["capacity_bytes"] for m in plan["memory"])
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == VERSION


@pytest.fixture(scope="module")
def plan(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of GRPO for the local cluster."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    done = hflow("compile", "algorithms/grpo.yaml", "--set", f"params.model={model}", "-o", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [f"wrote    {file}", f"next     hflow exec {file}"]
    return file


@pytest.mark.slow
def test_a_plan_that_cannot_run_says_so(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    shapes = ("--set", "params.model=shape:llama-7b", "--cluster", "a100x8")
    done = hflow("compile", "algorithms/grpo.yaml", *shapes, "-o", str(file))
    notes = [line for line in done.stdout.splitlines() if line.startswith("note")]
    assert file.exists() and "next " not in done.stdout
    assert "note     model `actor`: `shape:llama-7b` is a shape without weights: compile only" in notes
    unsaved = hflow("compile", "algorithms/grpo.yaml", *shapes).stdout.splitlines()
    assert [line for line in unsaved if line.startswith("note")] == notes
    told = json.loads(hflow("compile", "algorithms/grpo.yaml", *shapes, "--json").stdout)["compile_only"]
    assert "model `actor`: `shape:llama-7b` is a shape without weights: compile only" in told
    assert json.loads(hflow("explain", str(file), "--json").stdout)["compile_only"] == told


def test_a_plan_that_runs_is_not_compile_only(plan: Path) -> None:
    assert json.loads(hflow("explain", str(plan), "--json").stdout)["compile_only"] == []


def test_options_are_those_of_the_compiler() -> None:
    assert get_args(AfterPass) == (*(step.__name__ for step in PASSES), "all")


@pytest.mark.slow
def test_a_plan_is_explained_as_it_was_printed(model: str, plan: Path, tmp_path: Path) -> None:
    printed = hflow("compile", "algorithms/grpo.yaml", "--set", f"params.model={model}").stdout
    html, trace = tmp_path / "new/plan.html", tmp_path / "trace.json"
    done = hflow("explain", str(plan), "--html", str(html), "--trace", str(trace))
    assert done.returncode == 0
    assert done.stdout.startswith(f"{printed}\nfunction ")
    assert done.stdout.endswith(f"\nwrote    {html}  {trace}\n")
    assert html.read_text().startswith("<!doctype html>") and json.loads(trace.read_text())["traceEvents"]
    assert json.loads(hflow("explain", str(plan), "--json").stdout)["graph"] == "grpo"
    assert hflow("explain", str(plan), "--ascii").stdout.isascii()


@pytest.mark.slow
def test_the_functions_of_a_plan_and_what_has_changed_since(model: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "model", tmp_path / "plan.json"
    shutil.copytree(model, folder)
    (tmp_path / "mine.py").write_text(REWARD)
    child = f"hflow: 1\nextends: {Path('algorithms/grpo.yaml').absolute()}\nname: mine\n"
    (tmp_path / "mine.yaml").write_text(child + "nodes: {reward: {fn: ./mine.py:same}}\n")
    done = hflow("compile", str(tmp_path / "mine.yaml"), "--set", f"params.model={folder}", "-o", str(file))
    assert done.returncode == 0, done.stderr
    explained = json.loads(hflow("explain", str(file), "--json").stdout)
    digests = {f["function"]: f["digest"] for f in explained["functions"]}
    assert {f["state"] for f in (*explained["functions"], *explained["model_files"])} == {"same"}
    reference = f"{tmp_path / 'mine.py'}:same"
    assert digests[reference] == hashlib.sha256(REWARD.encode()).hexdigest()

    (tmp_path / "mine.py").write_text(REWARD + "# changed\n")
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    text = hflow("explain", str(file)).stdout
    (row,) = (line for line in text.splitlines() if line.endswith("changed since"))
    assert digests[reference][:12] in row and " reward " in row
    assert "model` has changed since the graph was compiled: `config.json`" in " ".join(text.split())
    explained = json.loads(hflow("explain", str(file), "--json").stdout)
    assert {f["function"]: f["state"] for f in explained["functions"]}[reference] == "changed"
    assert {f["name"] for f in explained["model_files"] if f["state"] == "changed"} == {"config.json"}
    done = hflow("exec", str(file), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 1 and done.stderr.startswith("error[HF406]: models `actor`, `ref`: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_a_run_took_is_put_beside_the_plan(plan: Path, tmp_path: Path) -> None:
    found = load_plan(plan)
    times = {f"time_s.{n.node}": n.time_s * (3 if n.node == "rollout" else 1) for n in found.nodes}
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "started", "plan": found.hash}) + "\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, **times}) + "\n")
    done = hflow("explain", str(plan), "--analyze", str(tmp_path))
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("rollout ") and "3.00" in line)
    assert row.endswith("!")
    measured = json.loads(hflow("explain", str(plan), "--analyze", str(tmp_path), "--json").stdout)[
        "measured"
    ]
    assert {m["name"] for m in measured if m["off"]} == {"rollout"}


@pytest.mark.parametrize(
    ("executed", "code", "message"),
    [(None, "HF407", "is no run folder"), ("0" * 12, "HF306", "is a run of plan 000000000000")],
)
def test_a_run_of_something_else_is_refused(
    plan: Path, tmp_path: Path, executed: str | None, code: str, message: str
) -> None:
    if executed:
        (tmp_path / "events.jsonl").write_text(json.dumps({"event": "started", "plan": executed}) + "\n")
        (tmp_path / "metrics.jsonl").write_text("")
    done = hflow("explain", str(plan), "--analyze", str(tmp_path))
    assert done.returncode == 1 and f"error[{code}]" in done.stderr and message in done.stderr


@pytest.mark.parametrize("line", ['{"step"', "[]", '{"step": 1, "step": 2}'])
def test_metrics_of_which_a_part_was_written_are_refused(plan: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"plan": load_plan(plan).hash}) + "\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0}) + f"\n{line}")
    done = hflow("explain", str(plan), "--analyze", str(tmp_path))
    assert done.returncode == 1 and "error[HF407]: line 2 of" in done.stderr


@pytest.mark.slow
def test_a_plan_that_is_overwritten_is_compared(model: str, plan: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan.read_text())
    command = [
        "compile",
        "algorithms/grpo.yaml",
        "--set",
        f"params.model={model}",
        "--pin",
        "actor_train=tp2",
    ]
    (changed,) = changes(hflow(*command, "-o", str(file)), "actor_train")
    assert " dp2" in changed and "-> tp2" in changed
    assert changes(hflow(*command, "-o", str(file))) == ["nothing: the same layouts on the same devices"]
    assert changes(hflow(*command, "--diff", str(plan)), "actor_train") == [changed]
    assert changes(hflow(*command)) == []
    missing = hflow(*command, "--diff", str(tmp_path / "none.json"))
    assert missing.returncode == 1 and "error[HF001]" in missing.stderr


def changes(done: subprocess.CompletedProcess[str], start: str = "") -> list[str]:
    assert done.returncode == 0, done.stderr
    lines = [
        line.removeprefix("changed").strip() for line in done.stdout.splitlines() if "changed" in line[:8]
    ]
    return [line for line in lines if line.startswith(start)]


@pytest.mark.slow
def test_passes_print_what_they_make(model: str) -> None:
    command = ["compile", "algorithms/grpo.yaml", "--set", f"params.model={model}", "--print-after"]
    every = hflow(*command, "all").stdout
    heads = [line for line in every.splitlines() if line.startswith("--- after ")]
    assert heads == [f"--- after {step.__name__}" for step in PASSES]
    one = hflow(*command, "place").stdout
    assert one.count("--- after ") == 1 and one.partition("\ngrpo ")[0] in every
    assert "generate actor %prompts.tokens @a" in every and "train actor_train: actor" in every


@pytest.mark.slow
def test_json_stands_alone(model: str) -> None:
    command = ["compile", "algorithms/grpo.yaml", "--set", f"params.model={model}", "--json"]
    for option in (
        ("--explain", "rollout"),
        ("--efficiency",),
        ("--print-after", "all"),
        ("--diff", "plan.json"),
    ):
        assert hflow(*command, *option).returncode == 2


@pytest.mark.slow
def test_a_placement_and_a_planner_can_be_asked_for(model: str) -> None:
    command = ["compile", "algorithms/grpo.yaml", "--set", f"params.model={model}", "--json"]
    apart = json.loads(hflow(*command, "--placement", "standalone").stdout)
    assert sorted(len(group["models"]) for group in apart["placement"]) == [1, 1]
    together = json.loads(hflow(*command, "--placement", "colocate").stdout)
    assert [group["models"] for group in together["placement"]] == [["actor", "ref"]]
    assert json.loads(hflow(*command, "--planner", "exhaustive").stdout)["search"]["planner"] == "exhaustive"
    assert hflow(*command, "--placement", "nowhere").returncode == 2


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_check_is_light(algorithm: str) -> None:
    """`hflow check` imports none of the heavy packages."""
    code = (
        "import sys; from typer.testing import CliRunner; from hflow.cli.app import app;"
        f"r = CliRunner().invoke(app, ['check', 'algorithms/{algorithm}.yaml']);"
        "assert r.exit_code == 0, r.output;"
        "heavy = {'torch', 'ray', 'megatron', 'sglang', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_compile_is_light(model: str) -> None:
    code = (
        "import sys, hflow;"
        f"hflow.compile(hflow.load('algorithms/grpo.yaml', ['params.model={model}']), 'clusters/local.yaml');"
        "heavy = {'torch', 'ray', 'megatron', 'sglang', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_all_errors_of_a_file_at_once() -> None:
    done = hflow("check", "tests/bad/many_at_once.yaml")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("error[") >= 3 and "^" in done.stderr and "Traceback" not in done.stderr
    told = hflow("check", "tests/bad/many_at_once.yaml", "--json")
    assert told.returncode == 1 and told.stderr == ""
    found = json.loads(told.stdout)
    assert found.keys() == {"ok", "diagnostics"} and found["ok"] is False
    for one in found["diagnostics"]:
        place = f"{one['file']}:{one['line']}:{one['column']}"
        assert f"{one['severity']}[{one['code']}]: {one['message']}" in done.stderr
        assert place in done.stderr and one["help"] in done.stderr
    assert len(found["diagnostics"]) == done.stderr.count("error[") + done.stderr.count("warning[")


def test_what_a_graph_is_as_json() -> None:
    done = hflow("check", "grpo", "--json")
    assert done.returncode == 0 and done.stderr == ""
    found = json.loads(done.stdout)
    graph = package.load("algorithms/grpo.yaml")
    assert found["ok"] is True and found["diagnostics"] == []
    assert found["graph"] == {
        "name": "grpo",
        "nodes": [node.name for node in graph.nodes],
        "data_edges": len(list(graph.edges())),
        "models": ["actor", "ref"],
        "evaluations": {e.name: [m.name for m in e.metrics] for e in graph.evaluations},
    }
    missing = json.loads(hflow("check", "nowhere.yaml", "--json").stdout)
    assert [d["code"] for d in missing["diagnostics"]] == ["HF001"]


def test_no_help_is_cut_at_80_columns() -> None:
    done = subprocess.run(
        [*HFLOW, "--help"], capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "80"}
    )
    commands = done.stdout.split("Commands:\n")[1]
    assert len(commands.splitlines()) == len([name for name in FLAGS if " " not in name])
    assert "..." not in commands and max(map(len, commands.splitlines())) <= 80


def test_version_and_completion() -> None:
    done = hflow("--version")
    assert (done.returncode, done.stdout) == (0, f"hflow {package.__version__}\n")
    # The shell is found among the processes that have started this one: `sh` under some of make's recipes.
    command = f"{shlex.join([*HFLOW, '--show-completion'])}; exit $?"
    script = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert script.returncode == 0 and "complete" in script.stdout


def test_misuse_is_exit_code_2() -> None:
    assert hflow("exec", "--nope").returncode == 2
    assert hflow("nope").returncode == 2


@pytest.mark.slow
def test_a_plan_takes_no_other_choices(model: str, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    assert (
        hflow("compile", "algorithms/sft.yaml", "--set", f"params.model={model}", "-o", plan).returncode == 0
    )
    over = tmp_path / "over.yaml"
    over.write_text("run: {restarts: 1}\nparams: {steps: 1}\n")
    for option in (
        ("--cluster", "local4"),
        ("--pin", "actor_train=tp2"),
        ("--set", "params.steps=1"),
        ("--set", "run.checkpoint=10", "--set", "params.steps=1"),
        ("-f", str(over)),
    ):
        done = hflow("exec", plan, *option)
        assert done.returncode == 1 and "error[HF306]" in done.stderr
        assert "-f and --set change the section `run` alone" in done.stderr
    done = hflow("exec", plan, "-f", str(tmp_path / "nothing.yaml"))
    assert done.returncode == 1 and "error[HF001]" in done.stderr


@pytest.mark.slow
def test_how_a_plan_is_kept_is_checked(model: str, plan: Path, tmp_path: Path) -> None:
    over = tmp_path / "over.yaml"
    over.write_text("run:\n  checkpoint: {every: 10, best: loss.actor}\n")
    run = ("--run-dir", str(tmp_path / "run"), "--workers", "inline")
    done = hflow("exec", str(plan), "-f", str(over), *run)
    assert done.returncode == 1 and f"{over}:2:33" in done.stderr
    assert "error[HF228]: no train node is called `actor`" in done.stderr
    assert "did you mean `loss.actor_train`?" in done.stderr
    done = hflow("exec", str(plan), "--set", "run.checkpoint.evry=3", *run)
    assert done.returncode == 1 and "did you mean `every`?" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.rotating(6)
@pytest.mark.slow
@pytest.mark.parametrize("saved", [False, True])
def test_a_run_folder_tells_how_the_run_is_kept(model: str, tmp_path: Path, saved: bool) -> None:
    graph, run = tmp_path / "kept.yaml", tmp_path / "run"
    graph.write_text(Path("tests/runtime/grpo_small.yaml").read_text() + "\nrun: {restarts: 2}\n")
    shutil.copy("tests/runtime/rewards.py", tmp_path)
    options = ["--cluster", "local1", "--set", f"params.model={model}", "--set", "params.steps=1"]
    source = [str(graph), *options]
    if saved:
        plan = str(tmp_path / "plan.json")
        assert hflow("compile", *source, "-o", plan).returncode == 0
        source = [plan, "--set", "run.restarts=2"]
    kept = ["--set", "run.checkpoint={every: 1, best: reward_mean}", "--set", "run.grace=5"]
    done = hflow("exec", *source, *kept, "--run-dir", str(run), "--workers", "inline")
    assert done.returncode == 0, done.stderr
    policy = CheckpointPolicy(1, best="reward_mean")
    assert read_run_config(run / "run.yaml") == RunConfig(policy, restarts=2, grace_s=5)
    assert "run:" not in (run / "graph.yaml").read_text()


@pytest.mark.slow
def test_a_plan_is_no_graph(model: str, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    made = hflow("compile", "algorithms/sft.yaml", "--set", f"params.model={model}", "-o", plan)
    assert made.returncode == 0
    for command in (("check", plan), ("show", plan), ("show", "--resolved", plan), ("compile", plan)):
        done = hflow(*command)
        assert done.returncode == 1 and done.stderr.splitlines() == [
            f"error[HF306]: `{plan}` is a plan, not a graph",
            f" = help: `hflow explain {plan}` prints it, `hflow exec {plan}` runs it",
            "",
        ]


def test_old_samples_are_compiled_where_the_train_node_allows_them(model: str) -> None:
    command = [
        "compile", "algorithms/grpo.yaml", "--set", f"params.model={model}",
        "--set", "nodes.rollout.model={use: actor, lag: 1}",
    ]  # fmt: skip
    done = hflow(*command)
    assert done.returncode == 1 and "error[HF223]" in done.stderr
    done = hflow(*command, "--set", "nodes.actor_train.with.max_lag=1")
    assert done.returncode == 0, done.stderr


def test_the_saved_graph_is_the_one_that_ran(tmp_path: Path) -> None:
    """A graph's text, overrides included, loads as the same graph."""
    overrides = ["params.steps=3", "nodes.rollout.with.temperature=1.0", "seed=5"]
    graph = load("algorithms/grpo.yaml", overrides)
    (tmp_path / "graph.yaml").write_text(graph.text)
    again = load(tmp_path / "graph.yaml")
    assert (again.params, again.seed, again.steps) == (graph.params, 5, 3)
    assert [n.options for n in again.nodes] == [n.options for n in graph.nodes]
    assert load("algorithms/grpo.yaml").text == Path("algorithms/grpo.yaml").read_text()


@pytest.mark.slow
def test_a_partial_file_is_merged_before_set(tmp_path: Path) -> None:
    over = tmp_path / "over.yaml"
    over.write_text("params: {steps: 3, group: 4}\n")
    done = hflow("show", "algorithms/grpo.yaml", "-f", str(over), "--set", "params.steps=5", "--resolved")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert f"group: 4 # {over}:1" in lines and "steps: 5 # --set params.steps=5" in lines
    assert any(line.startswith("times: 5 # algorithms/grpo.yaml:") for line in lines)
    assert (
        hflow("show", "algorithms/grpo.yaml").stdout == hflow("show", "--ir", "algorithms/grpo.yaml").stdout
    )


def test_what_is_resolved_is_shown_even_when_it_is_wrong() -> None:
    done = hflow("show", "algorithms/grpo.yaml", "--set", "params.group=0", "--resolved")
    assert done.returncode == 1 and "n: 0" in done.stdout and "error[HF212]" in done.stderr


@pytest.mark.slow
def test_fmt(tmp_path: Path) -> None:
    good, bad, broken = (tmp_path / f"{name}.yaml" for name in ("good", "bad", "broken"))
    good.write_text("hflow: 1\nname: x\n")
    bad.write_text("name: x # c\nhflow: 1\n")
    broken.write_text("a: {")
    done = hflow("fmt", "--check", str(good), str(bad))
    assert (done.returncode, done.stdout) == (1, f"not formatted  {bad}\n")
    done = hflow("fmt", str(broken), str(bad))
    assert done.returncode == 1 and "error[HF002]" in done.stderr and broken.read_text() == "a: {"
    assert bad.read_text() == "hflow: 1\nname: x # c\n"
    done = hflow("fmt", "--check", str(good), str(bad))
    assert (done.returncode, done.stdout) == (0, "")


def test_new(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hflow.cli.app", "new", "mine", "--from", "sft"]
    env = {"PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "ok     mine: 2 nodes" in done.stdout, done.stderr
    assert load(tmp_path / "mine.yaml").name == "mine"
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "error[HF001]" in done.stderr


def test_schema_is_the_one_in_the_docs() -> None:
    assert hflow("schema").stdout == Path("docs/schema/graph.v1.json").read_text()
