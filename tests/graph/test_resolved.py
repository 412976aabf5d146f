from __future__ import annotations

from pathlib import Path

import pytest

from hflow.graph.load import assembled, load, load_text
from hflow.graph.source.document import parse, read
from hflow.graph.write.resolved import resolved

ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
CHILD = """\
hflow: 1
extends: algorithms/grpo.yaml
name: child
params: {lr: 1e-6, group: 4}
nodes:
  actor_train: {with: {betas: [0.9, "${ clip }"]}}
"""


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_the_resolved_file_says_the_same(path: Path) -> None:
    assert load_text(resolved(assembled(read(path))), str(path)) == load(path)


def line(text: str, start: str) -> str:
    rows = (" ".join(row.split()) for row in text.splitlines())
    return next(row for row in rows if row.startswith(start))


def test_every_value_tells_its_origin() -> None:
    over = ["params.steps=3"]
    document = assembled(parse(CHILD, "child.yaml"), over)
    text = resolved(document)
    grpo = Path("algorithms/grpo.yaml").read_text().splitlines()
    clip = next(n for n, row in enumerate(grpo, 1) if row.startswith("  clip:"))
    times = next(n for n, row in enumerate(grpo, 1) if row.startswith("loop:"))
    assert line(text, "clip:") == f"clip: 0.2 # algorithms/grpo.yaml:{clip}"
    assert line(text, "group:") == "group: 4 # child.yaml:4"
    assert line(text, "steps:") == "steps: 3 # --set params.steps=3"
    assert line(text, "times:") == f"times: 3 # algorithms/grpo.yaml:{times} (${{ steps }})"
    assert line(text, "betas:") == "betas: [0.9, 0.2] # child.yaml:6"
    short = [row for row in text.splitlines() if " # " in row and row.index("#") <= 62]
    assert len({row.rindex("   # ") for row in short}) == 1


def test_what_cannot_be_evaluated_stays() -> None:
    document = parse('a: "${ nothing }"\n', "x.yaml")
    assert resolved(document) == 'a: "${ nothing }"   # x.yaml:1 (${ nothing })\n'
