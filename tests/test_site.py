"""The site: every page is in it, and links lead to pages. Its builder refuses broken links and anchors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from scripts.site import __main__ as site
from scripts.site.both_forms import with_python
from scripts.site.commands import commands_page
from scripts.site.gallery import algorithm_page, title_of
from scripts.site.moved_links import moved_links
from scripts.site.sitemap import ROOT, Sitemap
from tests.test_docs import PAGES

SITEMAP = Sitemap.of_repository()
FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*\"")


def moved(text: str, source: str = "docs/plans.md") -> str:
    return moved_links(text, source, SITEMAP.pages[source], SITEMAP)


def test_every_page_of_the_repository_is_one_of_the_site() -> None:
    examples = (ROOT / "examples").glob("*/*.md")
    assert {str(page.relative_to(ROOT)) for page in (*PAGES, *examples)} == SITEMAP.pages.keys()


def test_the_navigation_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text().replace("!!python/object/apply:pymdownx.slugs.slugify", "")
    config: Any = YAML(typ="safe").load(text)
    listed = [page for section in config["nav"] for pages in section.values() for page in pages]
    made = {f"algorithms/{name}.md" for name in SITEMAP.algorithms} | {"learning.md", "commands.md"}
    assert sorted(listed) == sorted({*SITEMAP.pages.values(), *made})


@pytest.mark.parametrize(
    ("written", "there"),
    [
        ("[a](running.md#sglang)", "[a](running.md#sglang)"),
        ("[a](../README.md)", "[a](index.md)"),
        ("[a](../algorithms/README.md#ppo)", "[a](algorithms/index.md#ppo)"),
        ("[a](../algorithms/grpo.yaml)", "[a](algorithms/grpo.md)"),
        ("[a](museum/README.md)", "[a](museum/index.md)"),
        ("[a](../examples/math_chat)", "[a](examples/math_chat.md)"),
        ("[a](../clusters/local.yaml)", "[a](files/clusters/local.yaml)"),
        ("[`ops`](../hflow/ops)", "`ops`"),
        ("[a](https://arxiv.org/abs/1707.06347)", "[a](https://arxiv.org/abs/1707.06347)"),
        ("`[a](running.md)` [b](#engines)", "`[a](running.md)` [b](#engines)"),
        ("```sh\n[a](../README.md)\n```", "```sh\n[a](../README.md)\n```"),
        (
            "[![a](algorithms/ppo.svg)](algorithms/ppo.svg)",
            "[![a](files/docs/algorithms/ppo.svg)](files/docs/algorithms/ppo.svg)",
        ),
        ('<img src="algorithms/ppo.svg">', '<img src="files/docs/algorithms/ppo.svg">'),
        ('<a href="running.md#sglang">', '<a href="running.html#sglang">'),
    ],
)
def test_links_are_right_in_the_site(written: str, there: str) -> None:
    assert moved(written) == there


def test_links_out_of_a_folder() -> None:
    text = moved("[a](../../docs/plans.md) [b](task.py)", "examples/math_chat/README.md")
    assert text == "[a](../plans.md) [b](../files/examples/math_chat/task.py)"


def test_graph_files_have_the_same_in_python_beside_them() -> None:
    part, wrong = "```yaml\nnodes: {}\n```\n", "```yaml\nhflow: 1\nextends: grpo\nname: no\nnode: {}\n```\n"
    whole = "```yaml\nhflow: 1\nextends: grpo\nname: mine\n\nparams: {batch: 64}\n```\n"
    shown = with_python(f"{part}\n{wrong}\n{whole}after", "docs/plans.md")
    assert shown.startswith(f'{part}\n{wrong}\n=== "Graph file"\n\n    ```yaml\n    hflow: 1\n')
    assert shown.endswith("\n    graph = g.graph()\n    ```\nafter")
    assert (
        '=== "Python"\n\n    ```python\n    import hflow\n\n    g = hflow.GraphBuilder(\n        "mine",'
        in shown
    )


@pytest.mark.slow
def test_the_page_of_an_algorithm_has_its_graph_and_plans() -> None:
    page = algorithm_page("dr_grpo")
    assert page.startswith("# Dr. GRPO\n") and "https://arxiv.org/abs/2503.20783" in page
    assert "algorithms/dr_grpo.svg" in page
    for tab in ("Graph file", "With what it extends", "Python", "h100x8", "a100x64", "h100x128"):
        assert f'=== "{tab}"\n' in page
    assert "hflow compile dr_grpo --cluster h100x8" in page
    assert re.search(r"\| h100x8 \| qwen2\.5-7b \| [\d.]+ s \| [\d,]+ \| [\d.]+ \|", page)


def test_the_page_of_commands_is_their_help() -> None:
    page = commands_page()
    assert "## hflow compile\n" in page and "| `--engine NODE=sglang` | What a generate node runs on" in page
    assert "```sh\nhflow show [GRAPH]\n```" in page


@pytest.mark.slow
def test_the_site_is_built_and_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the pages of algorithms, whose plans take minutes (`make acceptance` makes them)."""
    monkeypatch.setattr(site, "algorithm_page", lambda name: f"# {title_of(name)}\n")
    site.write_site(tmp_path / "build/site/pages")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "build/site/html").rglob("*.html"))
    assert len(pages) > len(SITEMAP.pages) + len(SITEMAP.algorithms)
    assert not [found for page in pages for found in FETCHED.findall(page.read_text())]
