"""Distributions of lengths against numerical integration, and how graph files state them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hflow.diagnostics import HflowError
from hflow.graph.builder.builder import GraphBuilder
from hflow.graph.changes import changes
from hflow.graph.ir import Graph
from hflow.graph.lengths import QUANTILES, ImpossibleLengthsError, Lengths
from hflow.graph.lengths_file import FILE, SeenLengths, lengths_text, read_lengths, seen_in
from hflow.graph.load import load, load_text
from hflow.graph.write.printer import ir
from hflow.graph.write.yaml_printer import to_yaml

GRPO = Path("algorithms/grpo.yaml")


@st.composite
def stated(draw: st.DrawFn) -> Lengths:
    """A greatest length, some rising quantiles, and a mean between what these admit."""
    greatest = draw(st.integers(1, 100_000))
    keys = draw(st.lists(st.sampled_from([*QUANTILES]), unique=True, max_size=4))
    tokens = sorted(draw(st.lists(st.integers(0, greatest), min_size=len(keys), max_size=len(keys))))
    quantiles = {key: float(n) for key, n in zip(sorted(keys, key=QUANTILES.__getitem__), tokens)}
    known = [(0.0, 0.0)] * (not quantiles or "p0" not in quantiles)
    known += [(QUANTILES[key], n) for key, n in quantiles.items()]
    known += [(1.0, float(greatest))] * ("p100" not in quantiles)
    shares = [(b[0] - a[0], a[1], b[1]) for a, b in pairwise(known)]
    least, most = (sum(s[0] * s[end] for s in shares) for end in (1, 2))
    return Lengths.of(greatest, least + (most - least) * draw(st.floats(0, 1)), quantiles)


@given(stated())
def test_survival_falls_from_1_to_0_and_its_integral_is_the_mean(lengths: Lengths) -> None:
    at = [lengths.greatest * number / 50 for number in range(51)]
    survivals = [lengths.survival(tokens) for tokens in at]
    assert lengths.survival(-1e-9) == pytest.approx(1)
    assert survivals == sorted(survivals, reverse=True)
    assert lengths.survival(lengths.longest) == lengths.survival(lengths.greatest) == 0
    assert lengths.excess(0) == pytest.approx(lengths.mean, rel=1e-5, abs=1e-5 * lengths.greatest)
    assert lengths.mean**2 <= lengths.mean_square * (1 + 1e-5) + 1e-4 * lengths.greatest**2


def test_a_mean_that_rounding_puts_above_the_greatest_length_is_it() -> None:
    assert Lengths.of(3, 3.0000000000000004, {"p50": 3.0}).mean == 3
    with pytest.raises(ImpossibleLengthsError, match="above the greatest length, 3"):
        Lengths.of(3, 3.001, {"p50": 3.0})


@given(stated(), st.floats(0.001, 0.999))
@example(Lengths(0.95, 1, (("p5", 1.0),)), 0.05)  # all of the part that ends there
def test_quantiles_are_those_stated_and_undo_survival(lengths: Lengths, share: float) -> None:
    for key, tokens in lengths.quantiles:
        below, above = (lengths.survival(tokens + sign * 1e-6 * lengths.greatest) for sign in (-1, 1))
        assert above <= 1 - QUANTILES[key] + 1e-9
        assert below >= 1 - QUANTILES[key] - 0.2 or tokens == 0  # 1e-6 of a steep part may be much of it
    tokens = lengths.quantile(share)
    assert lengths.survival(tokens + 1e-6 * lengths.greatest) <= 1 - share + 1e-6


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths.of(4096, 1019, {}),
        Lengths.of(4096, 3000, {}),
        Lengths.of(4096, None, {"p50": 800, "p95": 3000}),
        Lengths.of(4096, 1200, {"p0": 10, "p50": 800, "p99": 4000}),
    ],
    ids=str,
)
def test_integrals_agree_with_quadrature(lengths: Lengths) -> None:
    width = 0.25
    at = np.arange(width / 2, lengths.greatest, width)
    survival = np.array([lengths.survival(tokens) for tokens in at])
    assert lengths.mean == pytest.approx(width * survival.sum(), rel=1e-5)
    assert lengths.excess(900) == pytest.approx(width * survival[at > 900].sum(), rel=1e-5)
    assert lengths.mean_square == pytest.approx(width * (2 * at * survival).sum(), rel=1e-4)


def test_a_mean_alone_is_an_exponential_cut_off_at_the_greatest() -> None:
    far = Lengths.of(100_000, 1000, {})
    assert far.survival(2000) == pytest.approx(pow(2.718281828, -2), rel=1e-6)
    assert far.mean_square == pytest.approx(2 * 1000**2, rel=1e-3)
    half = Lengths.of(1000, 500, {})
    assert half.survival(250) == pytest.approx(0.75), "uniform"
    constant = Lengths.of(512, 512, {})
    assert (constant.survival(511.9), constant.quantile(0.1), constant.variance) == (1.0, 512, 0.0)


@pytest.mark.parametrize(
    ("mean", "quantiles", "key"),
    [
        (513, {}, "mean"),
        (None, {"p99": 600}, "p99"),
        (None, {"p50": 9, "p95": 8}, "p95"),
        (400, {"p90": 2}, "mean"),
    ],
)
def test_what_cannot_be_is_refused(mean: float | None, quantiles: dict[str, float], key: str) -> None:
    with pytest.raises(ImpossibleLengthsError) as refused:
        Lengths.of(512, mean, quantiles)
    assert refused.value.key == key


def grpo(*overrides: str) -> Graph:
    return load(GRPO, overrides)


STATED = ("nodes.rollout.lengths.mean=2.5", "nodes.prompts.lengths={p50: 4, p95: 7}")


def test_files_state_them_and_writers_say_them() -> None:
    graph = grpo(*STATED)
    assert graph.node("rollout").lengths == Lengths(2.5, 4)
    assert graph.node("prompts").lengths == Lengths(3.85, 8, (("p50", 4.0), ("p95", 7.0)))
    assert "lengths(mean=2.5)" in ir(graph) and "lengths(mean=3.85, p50=4, p95=7)" in ir(graph)
    assert load_text(to_yaml(graph)) == graph
    assert "lengths" not in to_yaml(grpo()) and "lengths" not in ir(grpo())


def test_no_value_depends_on_them() -> None:
    (first, second) = changes(grpo(), grpo(*STATED))
    assert {first.key, second.key} == {"nodes.rollout.lengths", "nodes.prompts.lengths"}
    assert first.harmless and second.harmless


def test_the_builder_states_them() -> None:
    made = GraphBuilder("sampling", steps=1)
    actor = made.model("actor", "models/tiny")
    prompts = made.data(
        "prompts", out={"tokens": "i32[batch, prompt~]"}, lengths={"mean": 3}, dataset="rows.jsonl", batch=2,
        prompt="{{ q }}", max_prompt_tokens=8,
    )  # fmt: skip
    made.generate("rollout", model=actor, prompt=prompts.tokens, lengths={"p50": 2}, max_new_tokens=4)
    graph = made.graph()
    assert graph.node("prompts").lengths == Lengths(3, 8)
    assert graph.node("rollout").lengths == Lengths(2.0, 4, (("p50", 2.0),))


def test_those_of_a_run_are_read(tmp_path: Path) -> None:
    seen = SeenLengths.of(Counter([1, 2, 2, 3, 4, 4, 4, 4]), greatest=4)
    assert dict(seen.lengths.quantiles)["p50"] == 3 and seen.lengths.mean == 3
    (tmp_path / FILE).write_text(lengths_text({"rollout": seen}))
    assert read_lengths(tmp_path) == {"rollout": seen}
    found = grpo(f"nodes.rollout.lengths.from={tmp_path}").node("rollout").lengths
    assert found == seen.lengths
    shorter = (
        grpo(f"nodes.rollout.lengths.from={tmp_path}", "params.max_new_tokens=2").node("rollout").lengths
    )
    assert shorter and shorter.longest == 2 and 1.5 < shorter.mean <= 2, "cut off at 2"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2, "nodes": {}}', '{"version": 1, "nodes": {"rollout": {"rows": 1}}}'],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert seen_in(tmp_path / "other") == {}
    with pytest.raises(HflowError, match="HF231"):
        grpo(f"nodes.rollout.lengths.from={tmp_path}")
    with pytest.raises(HflowError, match="HF407"):
        seen_in(tmp_path)
