"""The page of algorithms says what the files say: pictures, papers and line counts. To accept a change:

python -m tests.test_algorithms_page
"""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import pytest

from hflow.graph.ir import Graph
from hflow.graph.load import load
from hflow.plan.origin import Origin
from hflow.view.picture.carried_origin import with_origin
from hflow.view.picture.svg import graph_svg

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "algorithms" / "README.md"
PICTURES = ROOT / "docs" / "algorithms"
HEAD = "| picture | algorithm | paper | what is special | lines |\n|---|---|---|---|---|\n"
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
MODELS = {"actor", "critic", "ref", "reward", "cost", "cost_critic", "teacher"}
MOST_LINES = 70
FILES = {
    "SFT": "sft",
    "DPO": "dpo",
    "Reward model": "reward_model",
    "Cost model": "cost_model",
    "GRPO": "grpo",
    "Dr. GRPO": "dr_grpo",
    "RLOO": "rloo",
    "ReMax": "remax",
    "REINFORCE++": "reinforce_pp",
    "CISPO": "cispo",
    "GSPO": "gspo",
    "DAPO": "dapo",
    "Iterative GRPO": "iterative_grpo",
    "Asynchronous GRPO": "async_grpo",
    "GRPO with a tool": "tool_grpo",
    "Online DPO": "online_dpo",
    "On-policy distillation": "on_policy_distillation",
    "PPO": "ppo",
    "Safe RLHF": "safe_rlhf",
}  # in the order of the page: what builds on what
by_name = pytest.mark.parametrize("name", FILES.values())


def source(name: str) -> Path:
    return ROOT / "algorithms" / f"{name}.yaml"


def graph_of(name: str) -> Graph:
    return load(source(name))


def picture(name: str) -> str:
    graph = graph_of(name)
    return with_origin(graph_svg(graph), Origin(graph.text)) + "\n"


def bare_lines(text: str) -> list[str]:
    """Lines that are neither blank nor only a comment."""
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def anchor(title: str) -> str:
    """The fragment of a heading, by GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def opening(text: str) -> str:
    """The first paragraph of the comment at the head of a graph file."""
    lines = takewhile(lambda line: line.startswith("# "), text.splitlines())
    return " ".join(line.removeprefix("# ") for line in lines)


def linked(text: str) -> str:
    return ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def special(page: str) -> dict[str, str]:
    """What people wrote: by title, the sentence on what is special."""
    rows = (
        line.strip("|").split("|") for line in page.partition(HEAD)[2].splitlines() if line.startswith("|")
    )
    return {re.sub(r"\[(.*)\]\(.*\)", r"\1", row[1].strip()): row[3].strip() for row in rows}


def row(title: str, name: str, sentence: str) -> str:
    text = source(name).read_text()
    image = f"../docs/algorithms/{name}.svg"
    papers = "<br>".join(dict.fromkeys(linked(p.group()) for p in ARXIV.finditer(graph_of(name).doc)))
    parent = re.search(r"^extends: (\w+)\.yaml", text, re.MULTILINE)
    lines = f"{len(bare_lines(text))}" + (f" + [{parent.group(1)}]({parent.group(1)}.yaml)" if parent else "")
    thumbnail = f'<a href="{image}"><img src="{image}" width="260" alt="Graph of {title}"></a>'
    return f"| {thumbnail} | [{title}](#{anchor(title)}) | {papers} | {sentence} | {lines} |"


def section(title: str, name: str) -> str:
    image = f"../docs/algorithms/{name}.svg"
    about = linked(opening(source(name).read_text()))
    return f"## {title}\n\n[{name}.yaml]({name}.yaml): {about}\n\n[![Graph of {title}]({image})]({image})\n"


def page() -> str:
    """The page as it should be, around the sentences that people wrote."""
    written = PAGE.read_text()
    sentences = special(written)
    rows = "\n".join(row(title, name, sentences[title]) for title, name in FILES.items())
    sections = "\n".join(section(title, name) for title, name in FILES.items())
    return f"{written.partition(HEAD)[0]}{HEAD}{rows}\n\n{sections}"


def test_the_page_has_every_algorithm() -> None:
    assert {f.stem for f in (ROOT / "algorithms").glob("*.yaml")} == set(FILES.values())
    assert {f.stem for f in PICTURES.glob("*.svg")} == set(FILES.values())


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page()


def test_the_example_of_extending_is_dr_grpo() -> None:
    _, _, rest = PAGE.read_text().partition("```yaml\n")
    assert rest.partition("```")[0].splitlines() == bare_lines(source("dr_grpo").read_text())


def test_every_algorithm_has_a_sentence() -> None:
    sentences = special(PAGE.read_text())
    assert list(sentences) == list(FILES)
    assert all(re.fullmatch(r"[A-Z].*[^.]\.", sentence) for sentence in sentences.values())


@by_name
def test_the_picture_is_up_to_date(name: str) -> None:
    assert (PICTURES / f"{name}.svg").read_text() == picture(name)


@by_name
def test_the_file_is_short(name: str) -> None:
    assert len(bare_lines(source(name).read_text())) <= MOST_LINES


@by_name
def test_the_graph_says_its_name_and_its_paper(name: str) -> None:
    graph = graph_of(name)
    assert graph.name == name
    assert ARXIV.search(graph.doc)


@by_name
def test_models_have_the_usual_names(name: str) -> None:
    assert {m.name for m in graph_of(name).models} <= MODELS


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for stem in FILES.values():
        (PICTURES / f"{stem}.svg").write_text(picture(stem))
    PAGE.write_text(page())
