"""A damaged graph file is refused with diagnostics, or is a graph in which every reference leads somewhere.

Whether it does is worked out here again, from the YAML alone, without hflow's loader.
"""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from ruamel.yaml import YAML

from hflow.diagnostics import HflowError, render
from hflow.graph.evaluation import evaluation_graph
from hflow.graph.ir import Graph
from hflow.graph.load import check
from hflow.graph.write.printer import ir
from tests.graph.mutants import mutated

ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
MUTANTS, CHUNKS = 2000, 20
GENERATED = {"tokens", "logprobs", "mask", "text"}
SCORED = {"lm": {"logprobs", "entropy"}, "scalar": {"values", "score"}}
EXPRESSION = re.compile(r"\s*\$\{(.*)\}\s*", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The algorithms, where what they extend is found, and where a mutant may be put beside them."""
    return shutil.copytree("algorithms", tmp_path_factory.mktemp("mutants") / "algorithms")


@pytest.mark.slow
@pytest.mark.matrix(4, cover=False)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_damaged_file_is_refused_or_every_reference_resolves(folder: Path, chunk: int) -> None:
    path, accepted = folder / f"mutant_{chunk}.yaml", 0
    for seed in range(chunk * MUTANTS // CHUNKS, (chunk + 1) * MUTANTS // CHUNKS):
        path.write_bytes(mutated(ALGORITHMS[seed % len(ALGORITHMS)].read_bytes(), seed))
        try:
            graph, _ = check(path)
        except HflowError as error:
            assert_readable(error, path)
            continue
        assert_resolved(graph, merged(path))
        assert ir(graph) and (evaluation_graph(graph) or not graph.evaluation)
        accepted += 1
    assert 0 < accepted < MUTANTS // CHUNKS // 2  # most are damaged indeed, and some are not


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_every_reference_of_the_algorithms_resolves(path: Path) -> None:
    assert_resolved(check(path)[0], merged(path))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("reward.score}", "reward.scores}"),
        ("reward.score}", "rewards.score}"),
        ("model: ref", "model: reference"),
        ("metric: reward.score", "metric: reward.text"),
    ],
)
def test_the_resolver_of_this_test_finds_what_does_not_resolve(old: str, new: str) -> None:
    graph, tree = check("algorithms/grpo.yaml")[0], merged(Path("algorithms/grpo.yaml"))
    text = Path("algorithms/grpo.yaml").read_text()
    assert old in text
    with pytest.raises((AssertionError, KeyError)):
        assert_resolved(graph, evaluated(YAML(typ="safe").load(text.replace(old, new))))
    assert_resolved(graph, tree)


def assert_readable(error: HflowError, path: Path) -> None:
    assert any(d.severity == "error" for d in error.diagnostics)
    text = path.read_bytes().decode(errors="replace")
    for diagnostic in error.diagnostics:
        assert diagnostic.message and render(diagnostic, {str(path): text})


def assert_resolved(graph: Graph, tree: Mapping[str, Any]) -> None:
    """Every name in the file is one that the file defines, and the graph has exactly the file's edges."""
    outer = tree["nodes"]
    inner = {n: region for region, node in outer.items() for n in node.get("nodes", {})}
    nodes = {**outer, **{n: outer[region]["nodes"][n] for n, region in inner.items()}}
    written = dict(edges(nodes))
    for (name, _), reference in written.items():
        producer, port = reference.split(".")
        assert port in ports(nodes[producer], tree["models"]), reference
        reads_in = name if nodes[name]["op"] == "repeat" else inner.get(name)
        assert reads_in == inner.get(producer), reference
    for reference in metrics(tree):
        producer, port = reference.split(".")
        assert port in ports(nodes[producer], tree["models"]), reference
    for node in nodes.values():
        assert node.get("model") is None or used_model(node) in tree["models"]
        assert set(names(node.get("after", []))) <= nodes.keys()
    for model in tree["models"].values():
        assert model.get("refresh") is None or model["refresh"]["from"] in tree["models"]
    assert {n.name for n in graph.nodes} == nodes.keys()
    assert {(n.name, i.port): str(i.source) for n, i in graph.edges() if not i.derived} == written


def edges(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[tuple[str, str], str]]:
    """(node, input) and the `node.port` that it reads; what leaves a region enters its own node."""
    for name, node in nodes.items():
        region = node["op"] == "repeat"
        read = {"keep": node["until"]["keep"], **node["out"]} if region else node.get("in", {})
        for port, source in read.items():
            yield (name, port), source["from"] if isinstance(source, dict) else source


def metrics(tree: Mapping[str, Any]) -> list[str]:
    return [tree["eval"]["metric"]] if tree.get("eval") else []


def used_model(node: Mapping[str, Any]) -> str:
    return node["model"]["use"] if isinstance(node["model"], dict) else node["model"]


def names(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else value


def ports(node: Mapping[str, Any], models: Mapping[str, Any]) -> set[str]:
    """What a node makes; of a function, what the imported function says."""
    match node["op"]:
        case "data" | "repeat":
            return set(node["out"])
        case "generate":
            return GENERATED
        case "score":
            return SCORED[models[used_model(node)].get("head", "lm")]
        case "call":
            module, _, name = node["fn"].rpartition(".")
            signature = getattr(importlib.import_module(module), name).__hflow_signature__
            return set(re.findall(r"(\w+)\s*:", signature.partition("->")[2]))
        case _:
            return set()


def merged(path: Path) -> dict[str, Any]:
    """A graph file over what it extends, expressions evaluated."""
    return evaluated(unevaluated(path))


def unevaluated(path: Path) -> dict[str, Any]:
    tree = plain(YAML(typ="safe").load(path.read_bytes()))
    parent = tree.pop("extends", None)
    return over(unevaluated(path.parent / parent), tree) if parent else tree


def plain(value: Any) -> Any:
    """Keys as they are written: `null` and `true` are fine names."""
    spelt = {None: "null", True: "true", False: "false"}
    if isinstance(value, dict):
        return {k if isinstance(k, str) else spelt.get(k, str(k)): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def over(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in base.items() if tree.get(k, v) is not None}
    for key, value in tree.items():
        below = base.get(key)
        if isinstance(below, dict) and isinstance(value, dict) and not is_another_op(below, value):
            value = over(below, value)
        out |= {key: value} if value is not None else {}
    return out


def is_another_op(below: dict[str, Any], value: dict[str, Any]) -> bool:
    return "op" in below and "op" in value and below["op"] != value["op"]


def evaluated(tree: dict[str, Any]) -> dict[str, Any]:
    compiled: Callable[..., Any] = ImmutableSandboxedEnvironment().compile_expression

    def value(item: Any) -> Any:
        if isinstance(item, dict):
            return {k: value(v) for k, v in item.items()}
        if isinstance(item, list):
            return [value(v) for v in item]
        match = EXPRESSION.fullmatch(item) if isinstance(item, str) else None
        return compiled(match[1].strip())(**tree.get("params", {})) if match else item

    return value(tree)
