"""The documentation says what the code does: links, commands, codes, tables, and the README's example."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hflow.cli import app
from hflow.compiler.cluster_file import load_cluster
from hflow.diagnostics import CODES, HflowError
from hflow.graph.functions import read_function
from hflow.graph.kinds import data, generate, score, train
from hflow.graph.load import check
from hflow.graph.options import REQUIRED, Option
from hflow.graph.schema import keys_at

ROOT = Path(__file__).parent.parent
PAGES = sorted(page for folder in (".", "algorithms", "docs") for page in (ROOT / folder).glob("*.md"))
GRAPH_FILES = (ROOT / "docs/graph-files.md").read_text()

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED_FILE = re.compile(r"^`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def by_path(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda p: str(p.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, by GitHub's rule."""
    text = FENCE.sub("", page.read_text())
    titles = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {title.strip().replace(" ", "-") for title in titles}


@by_path(PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith("https://"):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not fragment or fragment in anchors(file), target


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every hflow command in a page's shell blocks."""
    for language, block in FENCE.findall(page.read_text()):
        lines = block.replace("\\\n", " ").splitlines() if language == "sh" else []
        yield from (shlex.split(line, comments=True) for line in lines if line.startswith("hflow "))


@by_path(PAGES)
def test_commands_and_their_options_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for _, name, *words in commands(page):
        assert name in group.commands, name
        known = {option for param in group.commands[name].params for option in param.opts}
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= known, (name, given - known)


def test_commands_are_found() -> None:
    assert {words[1] for page in PAGES for words in commands(page)} == {
        "check", "show", "compile", "exec", "new-model",
    }  # fmt: skip


@by_path(PAGES)
def test_diagnostic_codes_exist(page: Path) -> None:
    assert set(re.findall(r"HF\d{3}", page.read_text())) <= CODES.keys()


def section(text: str, heading: str) -> str:
    """What follows a heading, up to the next one."""
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, heading
    return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose first column is called `first`, without code marks."""
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows: list[list[str]] = []
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def documented(option: Option) -> list[str]:
    """An option's name, values and default as the documentation writes them."""
    if option.default is REQUIRED:
        return [option.name, option.expectation, "required"]
    default = "none" if option.default is None else json.dumps(option.default)
    return [option.name, option.expectation, default]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("data", data.OPTIONS),
        ("generate", generate.OPTIONS),
        ("score", score.OPTIONS),
        ("train", train.OPTIONS),
    ],
)
def test_option_tables_are_the_options(kind: str, options: tuple[Option, ...]) -> None:
    rows = table(section(GRAPH_FILES, f"### `{kind}`"), "option")
    assert [row[:3] for row in rows] == [documented(option) for option in options]


@pytest.mark.parametrize(
    ("heading", "path", "op"),
    [
        ("### Keys of the file", (), None),
        ("### Keys of a model", ("models", "actor"), None),
        ("### Keys of loop", ("loop",), None),
        ("### Keys of model", ("nodes", "rollout", "model"), "generate"),
        ("### `train`", ("nodes", "actor_train", "repeat"), "train"),
        ("## Evaluation", ("eval",), None),
    ],
)
def test_key_tables_are_the_schema(heading: str, path: tuple[str, ...], op: str | None) -> None:
    rows = table(section(GRAPH_FILES, heading), "key")
    assert {row[0] for row in rows} == set(keys_at(path, op) or ())


def test_code_table_is_the_list_of_codes() -> None:
    rows = table(section(GRAPH_FILES, "## Diagnostics"), "code")
    assert dict(rows) == CODES


def test_every_documented_cluster_key_is_needed_or_has_its_default(tmp_path: Path) -> None:
    """A cluster file made of the documented keys is accepted, and one without a required key is not."""
    rows = table(section((ROOT / "docs/plans.md").read_text(), "## Cluster files"), "key")
    values = {name: _example(name) for name, *_ in rows}
    required = [name for name, _, default in rows if default == "required"]
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps(_nested(values)))
    assert load_cluster(file)
    file.write_text(json.dumps(_nested({name: values[name] for name in required})))
    assert load_cluster(file)
    for missing in required:
        file.write_text(json.dumps(_nested({n: v for n, v in values.items() if n != missing})))
        with pytest.raises(HflowError, match="missing key"):
            load_cluster(file)


def _example(key: str) -> Any:
    texts = {"name": "test", "device.kind": "cpu", "device.platform": "cpu"}
    return texts.get(key, 1)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    out: dict[str, Any] = {}
    for dotted, value in values.items():
        *parents, last = dotted.split(".")
        inner = out
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return out


def test_the_readmes_example_is_a_correct_graph(tmp_path: Path) -> None:
    files = NAMED_FILE.findall((ROOT / "README.md").read_text())
    assert len(files) == 3
    for name, text in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    graph, warnings = check(tmp_path / "my_task/graph.yaml")
    assert (graph.name, warnings) == ("my_task", ())
    assert len((tmp_path / "my_task/sums.jsonl").read_text().splitlines()) >= graph.node("prompts").rows


def test_the_readmes_excerpt_is_in_the_file() -> None:
    excerpt = next(b for language, b in FENCE.findall((ROOT / "README.md").read_text()) if language == "yaml")
    assert excerpt in (ROOT / "algorithms/grpo.yaml").read_text()


def ops() -> list[str]:
    """Every function that the shipped op modules define with a signature."""
    found: list[str] = []
    for file in (ROOT / "hflow/ops").glob("*.py"):
        names = re.findall(r"^@op\(.*?^def (\w+)", file.read_text(), re.MULTILINE | re.DOTALL)
        found += [f"hflow.ops.{file.stem}.{name}" for name in names]
    return sorted(found)


@pytest.mark.parametrize("reference", ops())
def test_ops_are_documented_with_signature_and_options(reference: str) -> None:
    text = section((ROOT / "docs/ops.md").read_text(), f"### {reference}")
    function = read_function(reference, ROOT)
    signature = text.strip().partition("\n\n")[0]
    assert " ".join(signature.split()) == str(function.signature)
    rows = table(text, "option") if function.options else []
    assert [(name, default) for name, default, _ in rows] == [
        (option.name, json.dumps(option.default)) for option in function.options
    ]
