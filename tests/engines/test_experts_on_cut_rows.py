"""Models with experts on rows that are cut over context- and sequence-parallel ranks, as by PyTorch and
transformers, which cut nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hflow.graph.infer.kinds.generate import ROUTES
from hflow.plan.layout import Mesh
from hflow.plan.strategy import PLAIN, Strategy
from tests.engines.models import ADAM, Folders
from tests.engines.processes import Pool
from tests.engines.test_balanced_experts import balance_is_exact
from tests.engines.test_context_parallel import log_probs_are_those_of_transformers
from tests.engines.test_routes import Forced, drawn_routes
from tests.engines.test_strategies import train_on_rank, without_gradients
from tests.engines.test_train import PPO, compare, reference, rollout

MESHES = {
    "tp2": Mesh.of((0, 1), tp=2),
    "cp2": Mesh.of((0, 1), cp=2),
    "dp2cp2": Mesh.of((0, 1, 2, 3), dp=2, cp=2),
    "tp2dp2": Mesh.of((0, 1, 2, 3), dp=2, tp=2),
    "tp2cp2": Mesh.of((0, 1, 2, 3), cp=2, tp=2),
    "tp2pp2": Mesh.of((0, 1, 2, 3), pp=2, tp=2),
    "pp2cp2": Mesh.of((0, 1, 2, 3), pp=2, cp=2),
}
SP, EP2, RECOMPUTE = Strategy(sp=True), Strategy(ep=2), Strategy("full")
RUNS = {
    "cp2": ("cp2", PLAIN),
    "tp2 sp": ("tp2", SP),
    "dp2cp2 ep2": ("dp2cp2", EP2),
    "tp2dp2 sp ep2": ("tp2dp2", replace(SP, ep=2)),
    "tp2cp2 sp recompute": ("tp2cp2", replace(SP, recompute="full")),
    "pp2cp2 recompute": ("pp2cp2", RECOMPUTE),
    "tp2pp2 sp": ("tp2pp2", SP),
    "dp2cp2 ep2 recompute": ("dp2cp2", replace(EP2, recompute="full")),
    "tp2dp2 sp ep2 recompute": ("tp2dp2", Strategy("full", ep=2, sp=True)),
    "tp2dp2 sp ep4 etp1": ("tp2dp2", Strategy(ep=4, sp=True, whole_experts=True)),
    "tp2cp2 ep2 etp1 recompute": ("tp2cp2", Strategy("full", ep=2, whole_experts=True)),
    "tp2cp2 sp ep4 etp1": ("tp2cp2", Strategy(ep=4, sp=True, whole_experts=True)),
}
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
# Mixtral's test model has 6 experts.
CASES = [(run, family) for run in RUNS for family in FAMILIES if "ep4" not in run or family != "mixtral"]


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("run", "family"), CASES)
def test_gradients_equal_plain_pytorch(pool: Pool, folders: Folders, run: str, family: str) -> None:
    """Prompts that rows share, rows without response and rows shorter than there are ranks among them."""
    layout, strategy = RUNS[run]
    folder, mesh = folders.of(family, False), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    metrics, named = reference(folder, rollout(folder), options, 1, 1)
    results = pool.run(len(mesh.devices), train_on_rank, folder, mesh, rollout(folder), options, 1, strategy)
    # float32 gradients of size up to about 1; their rounding is about 1e-7
    compare([found[:2] for found in results], metrics, named, atol=1e-6)
    small = [
        name for name in named if name.endswith(("gate.weight", "router.weight", "o_proj.bias", "sinks"))
    ]
    assert min(named[name][0].abs().max() for name in small) > 1e-3, "there is something to be summed"


@pytest.mark.matrix(3, cover=False)
@pytest.mark.parametrize(
    ("run", "family"),
    [
        ("dp2cp2 ep2", "qwen3_moe"),
        ("tp2dp2 sp ep2", "mixtral"),
        ("tp2cp2 sp recompute", "gpt_oss"),
        ("tp2pp2 sp", "qwen3_moe"),
        ("cp2", "mixtral"),
        ("tp2dp2 sp ep4 etp1", "qwen3_moe"),
        ("tp2cp2 ep2 etp1 recompute", "mixtral"),
    ],
)
def test_gradients_of_the_balancing_loss(pool: Pool, folders: Folders, run: str, family: str) -> None:
    layout, strategy = RUNS[run]
    balance_is_exact(pool, folders.of(family, False), MESHES[layout], strategy)


@pytest.mark.matrix(3, cover=False)
@pytest.mark.parametrize(
    ("run", "family"),
    [
        ("dp2cp2 ep2 recompute", "qwen3_moe"),
        ("tp2dp2 sp ep2", "mixtral"),
        ("tp2cp2 sp recompute", "qwen3_moe"),
        ("pp2cp2 recompute", "mixtral"),
        ("tp2cp2 sp ep4 etp1", "qwen3_moe"),
    ],
)
def test_gradients_of_replayed_routes(
    pool: Pool, folders: Folders, monkeypatch: pytest.MonkeyPatch, run: str, family: str
) -> None:
    """Each rank is told the experts of its own tokens."""
    layout, strategy = RUNS[run]
    folder, mesh = folders.of(family, False), MESHES[layout]
    data = rollout(folder)
    data = {**data, ROUTES: drawn_routes(folder, data["tokens"])}
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    monkeypatch.setattr("tests.engines.test_train.Reference", Forced)
    metrics, named = reference(folder, data, options, 1, 1)
    results = pool.run(len(mesh.devices), train_on_rank, folder, mesh, data, options, 1, strategy)
    compare([found[:2] for found in results], metrics, named, atol=1e-6)  # as above


@pytest.mark.matrix(2, cover=False)
@pytest.mark.parametrize(
    ("layout", "strategy", "family"),
    [
        ("dp2cp2", Strategy(zero=1, ep=2), "qwen3_moe"),
        ("tp2dp2", Strategy(ep=2, sp=True), "gpt_oss"),
        ("dp2cp2", EP2, "mixtral"),
    ],
)
def test_updates_equal_torch_adamw(
    pool: Pool, folders: Folders, layout: str, strategy: Strategy, family: str
) -> None:
    """Four updates with clipping, by a norm that counts each expert once, and weight decay; ZeRO-1 splits the
    optimizer of an expert over the ranks of dp and cp that hold it."""
    folder, mesh = folders.of(family, False), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "token_mean", "clip_grad": 0.7, "weight_decay": 0.5}
    metrics, named = reference(folder, rollout(folder), options, 2, 2)
    results = pool.run(len(mesh.devices), train_on_rank, folder, mesh, rollout(folder), options, 2, strategy)
    assert metrics["grad_norm"] > 0.7
    weights = {name: (weight, weight) for name, (_, weight) in named.items()}
    parts = [(reported, without_gradients(found)) for reported, found, _ in results]
    # Adam divides by the root of a running mean: rounding of small gradients grows over four updates
    compare(parts, metrics, weights, atol=1e-5)


@pytest.mark.matrix(4, cover=False)
@pytest.mark.parametrize(("run", "family"), [case for case in CASES if "recompute" not in case[0]])
def test_log_probs_equal_transformers(pool: Pool, folders: Folders, run: str, family: str) -> None:
    layout, strategy = RUNS[run]
    log_probs_are_those_of_transformers(pool, folders.of(family, False), MESHES[layout], strategy)
