"""Every exhibit of docs/museum is told as its page prints it, and what it does well otherwise is not told.

After a diagnostic changed, this writes them into the page anew:

python -m tests.test_museum
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hflow
from hflow.diagnostics import HflowError, render
from hflow.graph.load import check_text, sources
from hflow.ops.evaluation import pass_at_k
from hflow.runtime.tools.new_model import new_model

ROOT = Path(__file__).parent.parent
FOLDER = Path("docs/museum")
PAGE = FOLDER / "README.md"
EXHIBIT = re.compile(r"^\[(\w+)\.yaml\]\(\1\.yaml\):\n\n```yaml\n(.*?)```\n\n```text\n(.*?)```$", re.M | re.S)
FILES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
# What mends each: the fault is this, and nothing else.
CHECKED = {
    "greedy_samples": ("0.0", "1.0"),
    "key_that_does_nothing": ("clip_hihg", "clip_high"),
    "ratio_of_itself": ("actor_train.logprobs", "rollout.logprobs"),
    "reference_at_another_temperature": ("1.0", "0.6"),
    "retokenised_turn": ("conversation.again", "rollout.tokens"),
    "stale_samples": ("{use: actor, lag: 3}", "actor"),
    "trained_on_what_is_evaluated": ("holdout: 0", "holdout: 64"),
    "truncated_samples": ("0.8", "1.0"),
    "two_temperatures": ("1.0", "0.6"),
}
COMPILED = {"another_vocabulary": ("digits", "scores"), "more_than_fits": ("7b", "0.5b")}
CLUSTERS = {"another_vocabulary": "local1", "more_than_fits": "h100x1"}
RUN = {"not_a_number": "HF405", "reward_that_never_ends": "HF401"}
MENDED = CHECKED | COMPILED
SMALL = (
    "params.batch=4", "params.group=2", "params.minibatch=8", "params.max_new_tokens=4",
    "params.holdout=0", "eval=null",
)  # fmt: skip


def exhibits() -> dict[str, tuple[str, str]]:
    """Of each its graph and what is told of it, as the page has them."""
    return {name: (graph, told) for name, graph, told in EXHIBIT.findall(PAGE.read_text())}


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def told(name: str, fault: str = "", mend: str = "") -> str:
    """All errors of a graph, as they are printed."""
    file = FOLDER / f"{name}.yaml"
    text = file.read_text()
    assert fault in text
    try:
        graph, _ = check_text(text.replace(fault, mend) if fault else text, str(file))
        if name in COMPILED:
            hflow.compile(graph, CLUSTERS[name])
    except HflowError as error:
        texts = sources(file)
        return "\n".join(render(problem, texts) + "\n" for problem in error.diagnostics)
    return ""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders that `another_vocabulary` names; the checkout's own are left alone."""
    for folder in ("algorithms", "docs", "clusters"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    make_models(tmp_path)
    monkeypatch.chdir(tmp_path)


def make_models(folder: Path) -> None:
    tiny = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 16, "force": True}
    new_model(folder / "build/letters", **tiny, alphabet="abcdefghijkl")  # type: ignore[arg-type]
    new_model(folder / "build/scores", **tiny, alphabet="abcdefghijkl", head="scalar")  # type: ignore[arg-type]
    new_model(folder / "build/digits", **tiny, alphabet="0123456789+=", head="scalar")  # type: ignore[arg-type]


def test_the_page_shows_every_exhibit_and_each_is_tried() -> None:
    assert sorted(exhibits()) == FILES == sorted([*MENDED, *RUN])
    for name, (graph, _) in exhibits().items():
        assert graph == (FOLDER / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", sorted(MENDED))
@pytest.mark.usefixtures("models")
def test_it_is_told_as_the_page_says(name: str) -> None:
    assert told(name) == exhibits()[name][1] != ""


@pytest.mark.parametrize("name", sorted(MENDED))
@pytest.mark.usefixtures("models")
def test_nothing_is_told_without_its_fault(name: str) -> None:
    assert told(name, *MENDED[name]) == ""


def test_the_page_names_what_shows_the_rest() -> None:
    for test, link in re.findall(r"`(test_\w+)` in \[\w+\.py\]\(([^)]+)\)", PAGE.read_text()):
        assert f"def {test}(" in (FOLDER / link).read_text()


def test_one_right_answer_of_four_is_a_pass_at_four() -> None:
    right = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    assert pass_at_k(right, k=4).item() == 1.0
    drawn = right[0][torch.randint(4, (100_000, 4), generator=torch.Generator().manual_seed(0))]
    assert drawn.amax(dim=1).mean().item() == pytest.approx(1 - 0.75**4, abs=0.01)  # what was reported


def execute(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "hflow.cli.app",
        "exec",
        *words,
        "--cluster",
        "local1",
        "--run-dir",
        str(run),
    ]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=280
    )


@pytest.fixture(scope="module")
def adder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "adder"
    new_model(folder, layers=1, hidden=16, heads=2, ffn=16, alphabet="0123456789+=")
    return f"params.model={folder}"


def settings(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUN))
def test_a_run_of_it_ends_and_says_why(name: str, adder: str, tmp_path: Path) -> None:
    done = execute(tmp_path / "run", f"{FOLDER}/{name}.yaml", *settings(adder, *SMALL, "params.steps=3"))
    assert done.returncode == 1
    shown = exhibits()[name][1]
    assert f"error[{RUN[name]}]" in shown and shown.strip() in done.stderr
    metrics = tmp_path / "run/metrics.jsonl"
    assert not metrics.exists() or metrics.read_text() == ""  # nothing was trained


@pytest.mark.slow
@pytest.mark.rotating(6)
def test_a_run_that_is_resumed_at_the_end_of_an_epoch_goes_on(adder: str, tmp_path: Path) -> None:
    """Eight rows, four a step: an epoch is two steps."""
    rows = tmp_path / "rows.jsonl"
    made = ({"metadata": {"expression": f"{n} + 1"}, "answer": f"{n + 1}"} for n in range(8))
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    of_these = tmp_path / "of_these.yaml"
    of_these.write_text(f'nodes: {{prompts: {{with: {{dataset: "{rows}", size: null, options: null}}}}}}')
    inline = ["--workers", "inline"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = [
        "algorithms/grpo.yaml",
        "-f",
        str(of_these),
        *settings(adder, *SMALL, "run.checkpoint={every: 2}"),
        *inline,
    ]
    for run, steps in ((whole, 4), (parts, 2)):
        done = execute(run, *words, *settings(f"params.steps={steps}"))
        assert done.returncode == 0, done.stderr
    again = [
        sys.executable,
        "-m",
        "hflow.cli.app",
        "exec",
        "--resume",
        str(parts),
        *settings("params.steps=4"),
    ]
    done = subprocess.run([*again, *inline], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = [
        [json.loads(line) for line in (r / "metrics.jsonl").read_text().splitlines()] for r in (whole, parts)
    ]
    losses = [[line["loss.actor_train"] for line in lines] for lines in found]
    assert len(losses[0]) == 4 and losses[0] == losses[1]


if __name__ == "__main__":
    make_models(Path())
    page = PAGE.read_text()
    for exhibit, (source, old) in exhibits().items():
        new = told(exhibit) if exhibit not in RUN else old
        page = page.replace(
            f"```yaml\n{source}```\n\n```text\n{old}```", f"```yaml\n{source}```\n\n```text\n{new}```"
        )
    PAGE.write_text(page)
