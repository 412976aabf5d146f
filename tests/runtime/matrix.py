"""The cases of the test matrix: pairs of placement, layouts, batching and hosts, on at most eight workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

import hflow
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan import Plan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.runtime.pairwise import Case as Values
from tests.runtime.pairwise import covering
from tests.runtime.recording import Recorded, recorded

WORKERS = 8
STEPS = 3
GRAPHS = Path(__file__).parent / "graphs"
ROWS, MINIBATCH = 24, 12  # of graphs/grpo_tiny.yaml and graphs/ppo_small.yaml
READERS = {"grpo": ("ref_logprobs",), "ppo": ("values", "reward", "ref_logprobs")}
TRAINERS = {"grpo": ("actor_train",), "ppo": ("actor_train", "critic_train")}
SAMPLES = {"grpo": 2, "ppo": 1}  # per prompt

# `placement`: on the same devices; actor and reference | the others; every model apart; training | reading.
# `train`: the actor's layout; `generate`: the rollout's; `others`: the critic's, or the reference's in GRPO.
FACTORS = {
    "algorithm": ("grpo", "ppo"),
    "placement": ("colocated", "split", "standalone", "hybrid"),
    "train": ("dp2", "tp2", "pp2", "dp3", "tp2,dp2", "pp2,tp2"),
    "generate": ("tp1", "dp2", "tp2", "tp4", "tp2,dp2"),
    "others": ("tp1", "dp2", "tp2", "pp2"),
    "strategy": ("plain", "zero1", "recompute"),
    "micro": ("least", "3", "whole"),
    "hosts": (1, 2),
}


@dataclass(frozen=True)
class Case:
    algorithm: str
    placement: str
    train: str
    generate: str
    others: str
    strategy: str
    micro: str
    hosts: int

    def __str__(self) -> str:
        layouts = f"{self.train} {self.generate} {self.others}"
        return f"{self.algorithm} {self.placement} {layouts} {self.strategy} {self.micro} {self.hosts}"

    @property
    def cluster(self) -> Cluster:
        devices = WORKERS // self.hosts
        return replace(load_cluster("local4"), name="eight", hosts=self.hosts, devices_per_host=devices)

    @property
    def pins(self) -> tuple[str, ...]:
        """How and where every node with a model runs."""
        layouts, starts = self.layouts, self._starts
        return tuple(
            f"{node}={layout},{','.join(self._settings(node))}@{_devices(starts[node], _size(layout))}"
            for node, layout in layouts.items()
        )

    @property
    def layouts(self) -> dict[str, str]:
        """By node. In PPO the reference lies as the actor trains where both are together, and whatever has a
        place of its own is on one device."""
        trained = {"rollout": self.generate, "actor_train": self.train}
        if self.algorithm == "grpo":
            return trained | {"ref_logprobs": self.others}
        alone = self.placement == "standalone"
        frozen = {"reward": "tp1" if alone else self.others, "ref_logprobs": "tp1" if alone else self.train}
        return trained | {"critic_train": self.others, "values": self.others} | frozen

    @property
    def _starts(self) -> dict[str, int]:
        """The first device of each node."""
        size = {node: _size(layout) for node, layout in self.layouts.items()}
        actor, critic = ("actor_train", "rollout"), ("critic_train", "values")
        ref, reward = ("ref_logprobs",), ("reward",)
        split = [(*actor, *ref), (*critic, *reward)] if self.algorithm == "ppo" else [actor, ref]
        groups = {
            "colocated": [(*actor, *critic, *ref, *reward)],
            "split": split,
            "standalone": [actor[:1], actor[1:], critic, ref, reward],
            "hybrid": [(*actor[:1], *critic), (*actor[1:], *ref, *reward)],
        }[self.placement]
        starts: dict[str, int] = {}
        first = 0
        for group in ([node for node in group if node in size] for group in groups):
            starts |= dict.fromkeys(group, first)
            first += max((size[node] for node in group), default=0)
        return starts

    def _settings(self, node: str) -> list[str]:
        """ZeRO, recomputation and the micro-batch of a node, none of them left to the planner."""
        layout = self.layouts[node]
        trains = node.endswith("_train")
        share = (MINIBATCH if trains else ROWS) // dict(_sizes(layout)).get("dp", 1)
        unit = SAMPLES[self.algorithm] if node == "rollout" else 1
        micro = {"least": unit, "3": 3 * unit, "whole": share}[self.micro]
        if not trains:
            return [f"micro{min(micro, share)}"]
        zero = "zero1" if self.strategy == "zero1" and "dp" in layout else "zero0"
        recompute = "recompute" if self.strategy == "recompute" else "no-recompute"
        return [f"micro{min(micro, share)}", zero, recompute]


class Matrix:
    """The plans of all cases and their runs on `workers`, and the one-worker runs; each is made once."""

    def __init__(self, workers: Pool, model: Path, reward_model: Path, folder: Path):
        self.workers, self.folder = workers, folder
        self._graphs = {
            "grpo": _load("grpo_tiny", model=model, steps=STEPS),
            "ppo": _load("ppo_small", model=model, reward_model=reward_model, steps=STEPS),
        }
        self._ones: dict[str, Recorded] = {}
        self._plans: dict[Case, Plan] = {}
        self._runs: dict[Case, Run] = {}

    def plan(self, case: Case) -> Plan:
        if case not in self._plans:
            self._plans[case] = hflow.compile(self._graphs[case.algorithm], case.cluster, case.pins)
        return self._plans[case]

    def run(self, case: Case) -> Run:
        if case not in self._runs:
            folder = self.folder / str(len(self._runs))
            self._runs[case] = execute(self.plan(case), folder, pool=self.workers, export=False)
        return self._runs[case]

    def one(self, algorithm: str) -> Recorded:
        """The run of one worker, in this process."""
        if algorithm not in self._ones:
            plan = hflow.compile(self._graphs[algorithm], "local1")
            self._ones[algorithm] = recorded(plan, self.folder / algorithm)
        return self._ones[algorithm]


def _load(name: str, **params: object) -> Graph:
    return hflow.load(GRAPHS / f"{name}.yaml", [f"params.{key}={value}" for key, value in params.items()])


def cases() -> list[Case]:
    """All pairs; and one of PPO whose rollout holds what the actor trains, which no pair asks for."""
    donating = Case("ppo", "colocated", "tp2", "dp2", "dp2", "plain", "whole", 1)
    return [*(Case(**values) for values in covering(FACTORS, allowed)), donating]


def allowed(values: Values) -> bool:
    """Whether there are workers enough; a tensor-parallel group does not leave its host, and ZeRO splits over
    dp."""
    case = Case(**values)
    layouts, starts = case.layouts, case._starts
    ends = [starts[node] + _size(layout) for node, layout in layouts.items()]
    return max(ends) <= WORKERS and (case.strategy != "zero1" or "dp" in case.train)


@cache
def _sizes(layout: str) -> list[tuple[str, int]]:
    return [(word[:2], int(word[2:])) for word in layout.split(",")]


@cache
def _size(layout: str) -> int:
    return prod(size for _, size in _sizes(layout))


def _devices(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}"
