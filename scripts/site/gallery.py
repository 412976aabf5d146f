"""The page of an algorithm: its graph as a picture, in YAML and in Python, plans of it, and how it learns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

import hflow
from hflow.graph.builder.python_printer import to_python
from hflow.graph.load import assembled, read_graph
from hflow.graph.source.document import dump
from hflow.plan.plan import Plan
from hflow.units import seconds
from hflow.view.terminal.terminal import plan_text
from scripts.site.both_forms import tab
from scripts.site.learning import curve_of
from scripts.site.sitemap import ROOT
from tests.compiler.workloads import settings

ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
PICTURES = "../files/docs/algorithms"  # which the page of all algorithms has, too
SECTION = re.compile(r"^## (.+)\n\n\[(\w+)\.yaml\]", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """Machines, and the model that an algorithm is planned with for them."""

    cluster: str
    shape: str


EXAMPLES = (
    Example("h100x8", "qwen2.5-7b"),
    Example("a100x64", "llama-13b"),
    Example("h100x128", "llama-70b"),
)


def title_of(name: str) -> str:
    """As the page of all algorithms has it."""
    sections = SECTION.findall((ROOT / "algorithms/README.md").read_text())
    return next(title for title, file in sections if file == name)


def algorithm_page(name: str) -> str:
    """The page of ``algorithms/<name>.yaml``."""
    return "\n\n".join(_parts(name)) + "\n"


def _parts(name: str) -> Iterator[str]:
    text = (ROOT / f"algorithms/{name}.yaml").read_text()
    opening = takewhile(lambda line: line.startswith("# "), text.splitlines())
    about = " ".join(line.removeprefix("# ") for line in opening)
    yield f"# {title_of(name)}"
    yield ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", about)
    yield f"[![Graph of {title_of(name)}]({PICTURES}/{name}.svg)]({PICTURES}/{name}.svg)"
    yield "## Graph"
    yield from _forms(name, text)
    if curve := curve_of(name):
        yield "## Learning"
        yield curve
    yield "## Plans"
    yield from _plans(name)


def _forms(name: str, text: str) -> Iterator[str]:
    whole = assembled(read_graph(ROOT / f"algorithms/{name}.yaml"))
    yield tab("Graph file", "yaml", text)
    if "\nextends:" in text:
        yield tab("With what it extends", "yaml", dump(whole))
    yield tab("Python", "python", to_python(whole))


def _plans(name: str) -> Iterator[str]:
    plans = [(example, *_planned(name, example)) for example in EXAMPLES]
    rows = [_row(example, plan) for example, plan, _ in plans]
    yield "\n".join(
        ["| cluster | models | a step | tokens/s | device hours a step |", "|---|---|---|---|---|", *rows]
    )
    for example, plan, command in plans:
        yield tab(example.cluster, "text", f"$ {command}\n\n{plan_text(plan, 110)}")


def _planned(name: str, example: Example) -> tuple[Plan, str]:
    """The plan, and the command that makes it."""
    said = settings(name, example.shape)
    plan = hflow.compile(hflow.load(ROOT / f"algorithms/{name}.yaml", said), example.cluster)
    sets = "".join(f" \\\n    --set {_quoted(setting)}" for setting in said)
    return plan, f"hflow compile {name} --cluster {example.cluster}{sets}"


def _quoted(setting: str) -> str:
    return f"'{setting}'" if set(setting) & set("{} ") else setting


def _row(example: Example, plan: Plan) -> str:
    step_s, devices = plan.step_time_s, len(plan.cluster.devices)
    rate, hours = plan.tokens_per_step / step_s, devices * step_s / 3600
    return f"| {example.cluster} | {example.shape} | {seconds(step_s)} | {rate:,.0f} | {hours:.3g} |"
