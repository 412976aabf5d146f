"""`hflow samples` and the page of samples: what is chosen, and what texts of models may not do."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from hflow.cli.app import app
from hflow.diagnostics import HflowError
from hflow.report.samples.chosen import choose_samples
from hflow.report.samples.page import samples_html
from hflow.report.samples.text import print_samples
from tests.report.run_folders import run_folder
from tests.report.sampled import HOSTILE, keep, sample
from tests.view.pages import parse

REWARDS = [0.5, None, 1.0, 0.25, float("nan")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = run_folder(tmp_path / "runs" / "grpo")
    said = [
        sample(row=n, reward=reward, response=f"answer {n}", **{"reward.score": reward, "judge.score": n / 2})
        for n, reward in enumerate(REWARDS)
    ]
    keep(run, 0, [sample(prompt="Häuser?", response="VIER")])
    keep(run, 10, said)
    return run


def rows(run: Path, step: int | None = None, sort: str = "", grep: str = "", limit: int = 9) -> list[int]:
    return [row["row"] for row in choose_samples(run, step, sort, grep, limit).rows]


def test_the_newest_step_in_its_order(run: Path) -> None:
    assert rows(run) == [0, 1, 2, 3, 4] and rows(run, limit=2) == [0, 1]
    assert rows(run, step=0) == [0]


def test_sorted_by_reward_what_has_none_is_last(run: Path) -> None:
    assert rows(run, sort="reward")[:3] == [2, 0, 3] and set(rows(run, sort="reward")[3:]) == {1, 4}
    assert rows(run, sort="-reward")[:3] == [3, 0, 2]
    assert rows(run, sort="judge.score") == [4, 3, 2, 1, 0]


def test_a_text_is_found_in_prompt_or_response(run: Path) -> None:
    assert rows(run, grep="ANSWER 3") == [3] and rows(run, grep="1+1") == [0, 1, 2, 3, 4]
    assert rows(run, step=0, grep="vier") == [0] and rows(run, step=0, grep="häuser") == [0]
    assert rows(run, grep="answer .") == []  # no pattern


@pytest.mark.parametrize(
    ("step", "sort", "message"),
    [(3, "", "no samples of step 3.*steps with samples: 0, 10"), (None, "rewards", "no column.*`reward`")],
)
def test_what_is_not_there_is_told(run: Path, step: int | None, sort: str, message: str) -> None:
    with pytest.raises(HflowError, match=f"(?s)HF407.*{message}"):
        choose_samples(run, step, sort, "", 3)


def test_a_run_without_samples_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(HflowError, match="(?s)HF407.*has no samples.*samples: 10"):
        choose_samples(run_folder(tmp_path / "bare"), None, "", "", 3)


def test_a_damaged_file_is_a_diagnostic(run: Path) -> None:
    (run / "samples/step-000010.parquet").write_bytes(b"PAR1 and no table")
    with pytest.raises(HflowError, match="HF407.*no table of samples"):
        choose_samples(run, None, "", "", 3)


def printed(run: Path, width: int) -> str:
    out = StringIO()
    chosen = choose_samples(run, None, "", "", 9)
    print_samples(chosen, Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


def test_terminals_are_given_nothing_to_obey(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    keep(run, 0, [sample(prompt=HOSTILE, response=f"[bold]x[/bold]\r{HOSTILE}\n\n漢字", finish="\x1b[2J")])
    text = printed(run, 80)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\\x1b[31mred" in text and "[bold]x[/bold]" in text and "漢字" in text


def test_it_is_readable_at_80_columns(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    told = {"reward": 0.123456, "advantage": -1.23456, "logprob": -1234.5678, "data_row": 123456}
    keep(run, 0, [sample(prompt="word " * 99, response="漢" * 400, length=99999, version=12345, **told)])
    lines = printed(run, 80).splitlines()
    assert max(map(cell_len, lines)) <= 80 and sum("漢" in line for line in lines) == -(-400 * 2 // 70)
    head = "row 0 · reward 0.1235 · advantage -1.235 · logprob -1235 · 99999 tokens, eos ·"
    assert head in [line.rstrip() for line in lines]


def test_long_texts_say_how_much_is_left_out(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    keep(run, 0, [sample(response="a" * 5000)])
    assert "3,400 more characters" in " ".join(printed(run, 200).split())


def test_the_command(run: Path) -> None:
    found = CliRunner().invoke(
        app, ["samples", "grpo", "--dir", str(run.parent), "--json", "--sort", "-reward"]
    )
    assert found.exit_code == 0, found.output
    whole = json.loads(found.stdout)
    assert [row["row"] for row in whole][:3] == [3, 0, 2] and whole[-1]["reward"] is None
    shown = CliRunner().invoke(app, ["samples", str(run), "--limit", "1"], env={"COLUMNS": "80"})
    assert "step 10: 1 of 5 samples" in shown.stdout and "judge.score: 0" in shown.stdout
    assert "reward.score" not in shown.stdout  # the reward by another name


def test_the_page_escapes_what_models_wrote(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    hostile = {"prompt": HOSTILE, "response": f"</pre>{HOSTILE}", "tool.observation": HOSTILE}
    keep(run, 0, [sample(**hostile, finish="<b>")])
    html = samples_html(run, "<i>grpo</i>")
    page = parse(html)
    assert not {"script", "b", "i"} & set(page.tags) and page.loaded == []
    assert "&lt;script&gt;" in html and "\x1b" not in html and "\u202e" not in html


def test_the_page_has_the_best_and_the_worst(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    for step in range(0, 1000, 10):
        keep(run, step, [sample(row=n, reward=n / 100, response=f"=={n}==") for n in range(20)])
    html = samples_html(run, "grpo")
    assert html.count("<summary>") == 40 and "step 0 " in html and "step 990 " in html
    newest = html[html.index("step 990 ") : html.index("</details>")]
    assert [n for n in range(20) if f"=={n}==" in newest] == [*range(4), *range(12, 20)]
