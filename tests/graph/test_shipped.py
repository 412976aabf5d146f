"""Names of shipped algorithms stand for their files, wherever hflow runs; files here go first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.load import load
from hflow.graph.write.new_file import new_file
from hflow.shipped import find, find_graph

ALGORITHMS = sorted(Path("algorithms").resolve().glob("*.yaml"))
CHILD = "hflow: 1\nextends: {}\nname: mine\nparams: {{lr: 0.5}}\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("file", ALGORITHMS, ids=lambda p: p.stem)
def test_every_algorithm_loads_by_its_name(file: Path) -> None:
    assert load(file.stem) == hflow.load(file.stem) == load(file)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["check"], ["show"], ["show", "--resolved"], ["compile"], ["exec"]])
def test_commands_know_algorithms(command: list[str]) -> None:
    """`exec` finds the algorithm, and then that there is no model."""
    model = ["--set", "params.model=shape:llama-7b", "--cluster", "h100x8"]
    given = model if command[0] in ("compile", "exec") else []
    arguments = [*command, "cispo", *given]
    done = subprocess.run([sys.executable, "-m", "hflow.cli.app", *arguments], capture_output=True, text=True)
    if command == ["exec"]:
        assert done.returncode == 1 and "HF406" in done.stderr and "compile only" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "") and "cispo" in done.stdout


def test_an_algorithm_can_be_extended_from_anywhere() -> None:
    Path("mine.yaml").write_text(CHILD.format("cispo"))
    graph = load("mine.yaml")
    assert (graph.name, graph.params["lr"]) == ("mine", 0.5)
    assert graph.node("actor_train").options.keys() == load("cispo").node("actor_train").options.keys()
    assert load("mine") == graph


def test_a_file_here_goes_first() -> None:
    Path("grpo.yaml").write_text(CHILD.format("grpo"))  # its parent is the algorithm, not itself
    assert find_graph("grpo") == Path("grpo.yaml")
    assert load("grpo").params["lr"] == 0.5
    Path("sub").mkdir()
    Path("sub/child.yaml").write_text(CHILD.format("grpo").replace("mine", "child"))
    assert load("sub/child.yaml").params["lr"] == 0.5
    Path("sub/grpo.yaml").write_text(CHILD.format("grpo").replace("lr: 0.5", "kl_coef: 0.5"))
    assert load("sub/child.yaml").params["kl_coef"] == 0.5  # beside the child, not where hflow runs
    Path("grpo").write_text(CHILD.format("ppo").replace("0.5", "1.0"))
    assert find_graph("grpo") == Path("grpo") and load("grpo").params["lr"] == 1.0


def test_a_folder_is_not_taken_for_a_file() -> None:
    Path("grpo").mkdir()
    Path("mine").mkdir()
    assert load("grpo").name == "grpo"
    with pytest.raises(HflowError, match="HF001.*cannot read `mine`: it is a folder"):
        load("mine")


@pytest.mark.parametrize(
    ("name", "help_"),
    [("gropo", "did you mean `grpo`?"), ("mime", "did you mean `mine`?"), ("zzz", "known: async_grpo")],
)
def test_names_that_are_none(name: str, help_: str) -> None:
    Path("mine.yaml").write_text(CHILD.format("grpo"))
    with pytest.raises(HflowError, match=f"no graph file or algorithm `{name}`") as caught:
        load(name)
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF001" and problem.help.startswith(help_)
    Path("child.yaml").write_text(CHILD.format(name))
    with pytest.raises(HflowError, match=f"cannot read `{name}`") as caught:
        load("child.yaml")
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF107" and problem.span and problem.span.line == 2
    assert problem.help.startswith(help_.replace("known:", "algorithms and files in that folder:"))


def test_a_file_with_a_suffix_is_no_name() -> None:
    with pytest.raises(HflowError, match=r"cannot read `grpo\.yaml`"):
        load("grpo.yaml")


def test_a_copy_of_a_child_names_its_parent() -> None:
    """Not the path to where hflow lies on this machine."""
    path = new_file("my_cispo", find("cispo", "algorithms", "algorithm"))
    assert "extends: grpo\n" in path.read_text()
    assert load(path).nodes == load("cispo").nodes
