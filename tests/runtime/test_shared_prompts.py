"""Replicas that make some of a prompt's samples each give the trajectory of one worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hflow
from hflow.graph.ir import Graph
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.runtime.small_algorithms import make_models, small_graph

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent
SMALL, KEPT = FOLDER / "grpo_small.yaml", FOLDER / "graphs/kept.yaml"
STEPS = 2


def sizes(prompts: int, samples: int) -> list[str]:
    """One update of all rows at once."""
    return [
        f"nodes.prompts.with.batch={prompts}", f"nodes.rollout.with.n={samples}",
        f"nodes.actor_train.repeat.minibatch={prompts * samples}",
    ]  # fmt: skip


TOOL, DAPO = Path("algorithms/tool_grpo.yaml"), Path("algorithms/dapo.yaml")
ROWS = ["params.batch=2", "params.minibatch=8"]
# The graph, what makes it small, and where it runs; of 2 prompts, or of one.
CASES: dict[str, tuple[Path, list[str], tuple[str, ...]]] = {
    "2 x 4 on dp4": (SMALL, sizes(2, 4), ("rollout=dp4@0-3", "ref_logprobs=dp2@2-3", "actor_train=dp2@0-1")),
    "1 x 4 on dp2": (SMALL, sizes(1, 4), ("rollout=dp2,tp2", "ref_logprobs=tp1@1", "actor_train=pp2,tp2")),
    "1 x 4 on dp4": (SMALL, sizes(1, 4), ("rollout=dp4", "ref_logprobs=tp1@3", "actor_train=cp2,tp2")),
    "kept sets": (KEPT, sizes(2, 2), ("rollout=dp4", "ref_logprobs=dp2@0-1", "actor_train=tp2,dp2")),
    "turns": (TOOL, ROWS, ("rollout=dp4@0-3",)),
    "a region": (DAPO, [*ROWS, "params.draw=2"], ("rollout=dp4@0-3", "actor_train=dp2@2-3")),
}


@pytest.fixture(scope="module")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Graph]:
    models = make_models(tmp_path_factory.mktemp("models"))

    def load(name: str) -> Graph:
        path, small, _ = CASES[name]
        if path.parent.name == "algorithms":
            return small_graph(path, models, STEPS, small)
        return hflow.load(path, [f"params.model={models['model']}", f"params.steps={STEPS}", *small])

    return load


@pytest.mark.parametrize("name", CASES)
def test_same_trajectory(workers: Pool, graph_of: Callable[[str], Graph], tmp_path: Path, name: str) -> None:
    graph = graph_of(name)
    plan = hflow.compile(graph, "local4", CASES[name][2])
    prompts = graph.node("rollout").inputs[0].type.rows
    assert plan.node("rollout").mesh.dp > prompts, "no prompt is shared"
    run = execute(plan, tmp_path / "several", pool=workers, export=False)
    one = execute(hflow.compile(graph, "local1"), tmp_path / "one", workers="inline", export=False)
    assert len({line["digest.rollout"] for line in one.metrics}) == STEPS
    for mine, theirs in zip(run.metrics, one.metrics, strict=True):
        compare(mine, theirs)
    assert run.evaluations == pytest.approx(one.evaluations, rel=1e-5)
    compare_samples(run, one)


def compare(mine: dict[str, float], theirs: dict[str, float]) -> None:
    """Tokens and counts are equal; a loss is a difference of advantages that cancel, 1e-2 large."""
    for name in (n for n in theirs if n.startswith("digest.") or n == "tokens"):
        assert mine[name] == theirs[name], name
    for name in ("rollout.response_length", "reward.score", "actor_train.staleness"):
        assert mine.get(name) == pytest.approx(theirs.get(name), rel=1e-6), name
    assert mine["loss.actor_train"] == pytest.approx(theirs["loss.actor_train"], rel=1e-5, abs=1e-7)
    assert mine["actor_train.grad_norm"] == pytest.approx(theirs["actor_train.grad_norm"], rel=1e-4)


def compare_samples(run: Run, one: Run) -> None:
    """The table of the last step: texts are equal, and numbers up to the order of float sums."""
    mine, theirs = run.samples(STEPS - 1), one.samples(STEPS - 1)
    assert mine.schema == theirs.schema and mine.num_rows > 0
    for name in mine.column_names:
        found, wanted = mine.column(name).to_pylist(), theirs.column(name).to_pylist()
        assert found == (pytest.approx(wanted, abs=1e-4) if isinstance(wanted[0], float) else wanted), name
