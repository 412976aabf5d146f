"""The documentation says what the code does: links, commands, codes, and tables."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from hflow.cli.app import app
from hflow.cli.plan_commands import AfterPass
from hflow.compiler.options import PLACEMENTS, PLANNERS
from hflow.diagnostics import CODES, HflowError
from hflow.graph.infer.functions import read_function
from hflow.graph.infer.kinds import call, data, data_options, generate, score, train
from hflow.graph.infer.signature import Tag
from hflow.graph.options import REQUIRED, Option
from hflow.graph.source.schema import OPS, keys_at
from hflow.plan.cluster_file import load_cluster

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page for folder in (".", "algorithms", "docs", "docs/museum") for page in (ROOT / folder).glob("*.md")
)
GRAPH_FILES = (ROOT / "docs/graph-files.md").read_text()
NODES = (ROOT / "docs/nodes.md").read_text()
RUNNING = (ROOT / "docs/running.md").read_text()
REGIONS = (ROOT / "docs/regions-and-time.md").read_text()

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
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
        command = group.commands[name]
        command = getattr(command, "commands", {}).get(words[0] if words else "", command)
        known = {option for param in command.params for option in param.opts}
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= known, (name, given - known)


def test_commands_are_found() -> None:
    assert {words[1] for page in PAGES for words in commands(page)} == {
        "check", "show", "fmt", "schema", "new", "compile", "explain", "exec", "new-model", "calibrate",
        "doctor", "runs", "export", "samples", "watch", "sweep",
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
    if option.default is REQUIRED and not option.optional:
        return [option.name, option.expectation, "required"]
    default = "none" if option.optional or option.default is None else json.dumps(option.default)
    return [option.name, option.expectation, default]


@pytest.mark.parametrize(
    ("heading", "options"),
    [
        ("## `data`", data.OPTIONS),
        ("### Mixtures", data_options.SOURCE_OPTIONS),
        ("### Curricula", data_options.CURRICULUM_OPTIONS),
        ("### Curricula by success", data_options.SUCCESS_OPTIONS),
        ("## `generate`", generate.OPTIONS),
        ("## Later turns", generate.CONTINUE_OPTIONS),
        ("## `score`", score.OPTIONS),
        ("## `train`", train.OPTIONS),
        ("## `call`", call.OPTIONS),
    ],
)
def test_option_tables_are_the_options(heading: str, options: tuple[Option, ...]) -> None:
    text = section(NODES, heading)
    rows = table(text, "option" if "| option |" in text else "key")
    assert [row[:3] for row in rows] == [documented(option) for option in options]


@pytest.mark.parametrize(
    ("page", "heading", "path", "op"),
    [
        (GRAPH_FILES, "### Keys of the file", (), None),
        (GRAPH_FILES, "### Keys of a model", ("models", "actor"), None),
        (GRAPH_FILES, "### Keys of loop", ("loop",), None),
        (NODES, "## Keys of an input", ("nodes", "rollout", "in", "prompt"), "generate"),
        (NODES, "## Keys of model", ("nodes", "rollout", "model"), "generate"),
        (NODES, "## `train`", ("nodes", "actor_train", "repeat"), "train"),
        (NODES, "## `repeat`", ("nodes", "sampling"), "repeat"),
        (NODES, "## Keys of until", ("nodes", "sampling", "until"), "repeat"),
        (GRAPH_FILES, "## Evaluation", ("eval",), None),
        (GRAPH_FILES, "## Named evaluations", ("evaluations", "test"), None),
        (GRAPH_FILES, "### Keys of a metric", ("evaluations", "test", "metrics", "score"), None),
        (RUNNING, "### Keys of run", ("run",), None),
        (RUNNING, "### Keys of checkpoint", ("run", "checkpoint"), None),
        (RUNNING, "### Keys of samples", ("run", "samples"), None),
        (RUNNING, "### Keys of replan", ("run", "replan"), None),
        (REGIONS, "## Refresh", ("models", "ref", "refresh"), None),
    ],
)
def test_key_tables_are_the_schema(page: str, heading: str, path: tuple[str, ...], op: str | None) -> None:
    rows = table(section(page, heading), "key")
    assert {row[0] for row in rows} == set(keys_at(path, op) or ())


@pytest.mark.parametrize(("heading", "kind"), [(f"## `{op}`", op) for op in OPS])
def test_every_kind_of_node_tells_its_keys(heading: str, kind: str) -> None:
    text = section(NODES, heading)
    if kind == "repeat":  # which has a table of them
        return
    told = re.search(r"Keys: (.*?)\.\n", text, re.DOTALL)
    assert told
    assert set(re.findall(r"`(\w+)`", told[1])) == set(keys_at(("nodes", "node"), kind) or ())


def test_the_tags_are_the_tags() -> None:
    rows = table(section((ROOT / "docs/types.md").read_text(), "## Signatures"), "tag of an input")
    assert {row[0] for row in rows} == {f"<{tag}>" for tag in get_args(Tag)}


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
    values = {"name": "test", "device.kind": "cpu", "device.platform": "cpu", "device.reserve": 0.5}
    values["device.overhead_gb"] = 0.25
    values["engines.generate"], values["engines.whole_rows"] = "sglang", True
    return values.get(key, 1)


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


PLANS = (ROOT / "docs/plans.md").read_text()


def test_every_option_of_compile_is_documented() -> None:
    group: Any = typer.main.get_command(app)
    params = [param for param in group.commands["compile"].params if param.param_type_name == "option"]
    first = (cell for cell, *_ in table(section(PLANS, "## Options"), "option of `hflow compile`"))
    told = {word for cell in first for word in re.findall(r"--?[a-z][a-z-]*", cell)}
    assert told <= {option for param in params for option in param.opts}
    assert [param.name for param in params if not told & set(param.opts)] == []


def test_every_placement_planner_and_pass_is_documented() -> None:
    text = section(PLANS, "## Placements and planners")
    for option, values in (("`--placement`", PLACEMENTS), ("`--planner`", PLANNERS)):
        names = [name for cell, *_ in table(text, option) for name in re.findall(r"[a-z][a-z-]+", cell)]
        assert tuple(n for n in names if n not in ("the", "default")) == values
    rows = {row[0]: row[1] for row in table(section(PLANS, "## Options"), "option of `hflow compile`")}
    assert set(get_args(AfterPass)) <= set(re.findall(r"\w+", rows["--print-after PASS"]))


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
    expected = [documented(option) for option in function.options]
    assert [row[:2] for row in rows] == [[name, default] for name, _, default in expected]
