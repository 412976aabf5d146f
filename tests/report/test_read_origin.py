"""Who is given a picture, a page or a model gets back the graph file and the plan that made it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hflow
from hflow.cli.app import app
from hflow.diagnostics import HflowError
from hflow.plan.origin import GRAPH_FILE, PLAN_FILE, Origin, origin_files, origin_of
from hflow.plan.plan import Plan, to_json, without_places
from hflow.plan.plan_file import load_plan
from hflow.report.read_origin import read_origin
from hflow.report.report import RunReport, report_html
from hflow.view.pages.notebook import graph_bundle, plan_bundle
from hflow.view.pages.plan_page import plan_html
from hflow.view.picture.carried_origin import carried_origin, with_origin

SVG = "{http://www.w3.org/2000/svg}"
SIZES = ["params.model=shape:qwen2.5-0.5b"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hflow.compile(hflow.load("algorithms/grpo.yaml", SIZES), "h100x8")


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, ["show", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_picture_gives_its_graph_back(tmp_path: Path) -> None:
    picture, again = tmp_path / "grpo.svg", tmp_path / "again.yaml"
    shown("grpo", "--set", "params.group=16", "--svg", str(picture))
    again.write_text(shown("--from", str(picture)))
    assert hflow.load(again) == hflow.load("algorithms/grpo.yaml", ["params.group=16"])


@pytest.mark.parametrize("page", ["plan", "report", "notebook"])
def test_a_page_gives_the_plan_back(page: str, plan: Plan, tmp_path: Path) -> None:
    made = {
        "plan": lambda: plan_html(plan),
        "report": lambda: report_html(RunReport(plan, [], {"status": "running"})),
        "notebook": lambda: plan_bundle(plan)["image/svg+xml"],
    }[page]()
    (tmp_path / "page").write_text(made)
    shown("--from", str(tmp_path / "page"), "--to", str(tmp_path / "again"))
    again = load_plan(tmp_path / "again/plan.json")
    assert again == without_places(plan) and again.hash == plan.hash
    assert hflow.load(tmp_path / "again/graph.yaml") == hflow.load("algorithms/grpo.yaml", SIZES)


@pytest.mark.parametrize("names", [(GRAPH_FILE, PLAN_FILE), ("graph.yaml", "plan.json")])
def test_a_folder_gives_both_back(names: tuple[str, str], plan: Plan, tmp_path: Path) -> None:
    for name, text in zip(names, origin_files(plan).values()):
        (tmp_path / name).write_text(text)
    assert read_origin(tmp_path) == origin_of(plan)


def test_nobody_is_told_where_the_graph_file_was(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "hflow: 1\nextends: grpo\nname: mine\n\nnodes:\n  rollout:\n    with: {n: 4}\n"
    )
    plan = hflow.compile(hflow.load(tmp_path / "mine.yaml", SIZES), "h100x8")
    assert str(tmp_path) in to_json(plan)
    assert not any(str(tmp_path) in text or str(Path.cwd()) in text for text in origin_files(plan).values())


def test_nothing_is_overwritten(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "x.svg").write_text(with_origin("<svg>\n</svg>", Origin(plan.graph.text)))
    (tmp_path / "to").mkdir()
    (tmp_path / "to/plan.json").write_text("mine")
    with pytest.raises(HflowError, match=r"HF001.*plan\.json` is there already"):
        words = ["show", "--from", str(tmp_path / "x.svg"), "--to", str(tmp_path / "to")]
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert [file.name for file in (tmp_path / "to").iterdir()] == ["plan.json"]


def test_graph_and_plan_are_of_one_picture(plan: Plan) -> None:
    alone = with_origin("<svg>\n</svg>", Origin("graph of the first"))
    both = with_origin("<svg>\n</svg>", origin_of(plan))
    assert carried_origin(f"<p>{alone}</p>{both}") == Origin("graph of the first")
    assert carried_origin(f"<p>{both}</p>{alone}") == origin_of(plan)


@pytest.mark.timeout(60)
def test_elements_without_an_end_take_no_time() -> None:
    assert carried_origin('<metadata id="hflow-graph">' * 10**6) is None


def test_texts_stay_as_they_are_and_pictures_xml(plan: Plan) -> None:
    origin = Origin("name: \"</metadata><script>alert(1)</script> & &lt; 'é'\"\n", '{"a": "]]>"}\n')
    svg = with_origin(graph_bundle(plan.graph)["image/svg+xml"], origin)
    first = [element.text for element in ET.fromstring(svg).iter(f"{SVG}metadata")][:2]
    assert first == [origin.graph, origin.plan] and carried_origin(svg) == origin
    assert "<script" not in svg


@pytest.mark.parametrize("text", ["<svg></svg>", '<metadata id="hflow-plan">{}</metadata>', ""])
def test_what_tells_nothing_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.svg").write_text(text)
    with pytest.raises(HflowError, match=r"HF001.*x\.svg` carries no graph file"):
        read_origin(tmp_path / "x.svg")
    with pytest.raises(HflowError, match="HF001.*carries no graph file"):
        read_origin(tmp_path)


def test_what_is_not_there_or_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HflowError, match="HF001.*does not exist"):
        read_origin(tmp_path / "none.svg")
    (tmp_path / "x.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(HflowError, match="HF001.*cannot be read: it is not UTF-8"):
        read_origin(tmp_path / "x.png")
    with pytest.raises(HflowError, match="HF001.*cannot be read: File name too long"):
        read_origin(tmp_path / ("x" * 300))


def test_a_graph_without_a_plan_writes_one_file(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "x.svg").write_text(with_origin("<svg>\n</svg>", Origin(plan.graph.text)))
    shown("--from", str(tmp_path / "x.svg"), "--to", str(tmp_path / "to"))
    assert [file.name for file in (tmp_path / "to").iterdir()] == ["graph.yaml"]


@pytest.mark.parametrize("words", [["grpo", "--from", "x.svg"], ["grpo", "--to", "x"], []])
def test_options_that_do_not_go_together_are_told(words: list[str]) -> None:
    with pytest.raises(HflowError, match="HF001"):
        CliRunner().invoke(app, ["show", *words], catch_exceptions=False)
