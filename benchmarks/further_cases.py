"""How long the planner takes on cases that it was not tuned for, and how good its proofs are there.

    python benchmarks/further_cases.py [--cases 40] [--seed 2026] [--budget SECONDS] [--large] [--save]

The cases are drawn with a fixed seed: eight algorithms; an actor and other models of one family but of sizes
of their own, some with experts; batches and lengths that are no powers of two; 1 to 12 hosts of 8 A100 or
H100, 3 and 5 among them. With --large there are 1 to 128 hosts, of 8, 6 or 4, and one case in three has a
node pinned to a layout or to the first devices. Each is compiled once with empty caches, in seconds of CPU
time. `gap` is the part by which the plan may be worse than the best of those searched, `plans` those priced.
Where nothing fits, the time is that of saying so. It names no module of hflow, so that an older one can be
measured: set PYTHONPATH. The last line is one JSON object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

import hflow

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = {  # how often each is drawn: those with more models have more plans
    "ppo": 4, "safe_rlhf": 4, "grpo": 1, "remax": 1, "async_grpo": 1, "dapo": 1, "online_dpo": 1,
    "on_policy_distillation": 1,
}  # fmt: skip
FAMILIES = {
    "llama": ("7b", "13b", "34b", "70b"),
    "qwen2.5": ("7b", "14b", "32b", "72b"),
    "qwen3": ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b"),
}
HOSTS = (1, 2, 3, 4, 5, 6, 8, 12)
LARGE = (*HOSTS, 16, 24, 32, 48, 64, 96, 128)
PER_LARGE = (8, 8, 8, 6, 4)  # devices of a host
PER_HOST = 24.0  # billions of parameters of the actor that a host may have, so that most cases fit
PROMPTS = {"dapo": "sampling.nodes.prompts"}  # the data node, if it is not `prompts`
NOTHING_FITS = {"HF302", "HF304", "HF305"}  # HF302: nor in the layout that is pinned
GROUPS_OF_8 = ("grpo", "async_grpo")


@dataclass(frozen=True)
class Case:
    """`overrides` of an algorithm's file; so many `hosts` of cluster file `kind`, of `devices` each."""

    algorithm: str
    models: str
    overrides: tuple[str, ...]
    kind: str
    hosts: int
    devices: int = 8
    pins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """CPU seconds to compile; the others are None where nothing fits."""

    algorithm: str
    models: str
    gpus: int
    pins: tuple[str, ...]
    seconds: float
    gap: float | None = None
    explored: int | None = None
    step_s: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds to compile, gap and plans priced.")
    parser.add_argument("--cases", type=int, default=40, help="how many cases are drawn")
    parser.add_argument("--seed", type=int, default=2026, help="of drawing them")
    parser.add_argument("--budget", type=float, help="seconds for one search, if not the fixed effort")
    parser.add_argument("--large", action="store_true", help="to 1,024 GPUs, on odd hosts, some with pins")
    parser.add_argument("--save", action="store_true", help="also write results/further_cases-DATE.json")
    options = parser.parse_args()
    print(f"{'algorithm':<24}{'gpus':>5}{'CPU s':>8}{'gap %':>8}{'plans':>8}  models")
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(options.cases, options.seed, options.large):
            found.append(measured(case, Path(folder), options.budget))
            show(found[-1])
    line = json.dumps(report(found))
    if options.save:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        (ROOT / f"benchmarks/results/further_cases-{date}.json").write_text(line + "\n")
    print(line)


def cases(count: int, seed: int, large: bool = False) -> list[Case]:
    random = Random(seed)
    return [grown(drawn(random, LARGE), random) if large else drawn(random) for _ in range(count)]


def grown(case: Case, random: Random) -> Case:
    """The same on hosts of any size, and with a pin in one case of three."""
    devices = random.choice(PER_LARGE)
    pins = (pin(case, random, devices * case.hosts),) if random.random() < 1 / 3 else ()
    return replace(case, devices=devices, pins=pins)


def pin(case: Case, random: Random, gpus: int) -> str:
    nodes = hflow.load(ROOT / f"algorithms/{case.algorithm}.yaml", case.overrides).nodes
    node = random.choice([node.name for node in nodes if node.model])
    if random.random() < 0.5:
        return f"{node}=tp{random.choice((1, 2, 4))}"
    return f"{node}=@0-{max(1, gpus // random.choice((1, 2, 4))) - 1}"


def drawn(random: Random, numbers: Sequence[int] = HOSTS) -> Case:
    algorithm = random.choices(list(ALGORITHMS), list(ALGORITHMS.values()))[0]
    family, hosts = random.choice(list(FAMILIES)), random.choice(numbers)
    sizes = [size for size in FAMILIES[family] if billions(size) <= PER_HOST * hosts]
    actor = random.choice(sizes)
    others = [size for size in sizes if billions(size) <= billions(actor)]
    models = hflow.load(ROOT / f"algorithms/{algorithm}.yaml").models
    taken = {m.name: actor if m.name in ("actor", "ref") else random.choice(others) for m in models}
    overrides = [f"models.{name}.path=shape:{family}-{size}" for name, size in taken.items()]
    overrides += [f"models.{name}.dtype=bf16" for name in taken]
    told = " ".join(f"{name} {size}" for name, size in taken.items() if name != "ref")
    kind = random.choice(("a100x8", "h100x8"))
    return Case(algorithm, f"{family}: {told}", (*overrides, *lengths(algorithm, random)), kind, hosts)


def billions(size: str) -> float:
    """Parameters of the model of a size like ``30b-a3b``."""
    return float(size.partition("b")[0])


def lengths(algorithm: str, random: Random) -> list[str]:
    """Overrides: rows, and the tokens of prompts and responses."""
    minibatch, prompt = random.choice((24, 48, 64, 80, 96, 128)), random.randrange(100, 2000, 50)
    rows, response = minibatch * random.randint(1, 8), random.randrange(100, 2000, 50)
    params = {"max_new_tokens": response, "minibatch": minibatch, "holdout": 96, "batch": rows}
    if algorithm in GROUPS_OF_8:
        params["batch"] = rows // 8
    if algorithm == "online_dpo":
        params["batch"] = rows // 2
    if algorithm == "dapo":
        params |= {"batch": rows // 8, "draw": rows // 4, "rounds": 4, "overlong": 50}
    data = [f"nodes.{PROMPTS.get(algorithm, 'prompts')}.with.max_prompt_tokens={prompt}"]
    if algorithm == "safe_rlhf":
        data += [f"nodes.texts.with.max_{what}_tokens={prompt}" for what in ("prompt", "response")]
    return [*(f"params.{name}={value}" for name, value in params.items()), *data]


def measured(case: Case, folder: Path, budget_s: float | None) -> Measured:
    """Once, when nothing is known from before."""
    graph = hflow.load(ROOT / f"algorithms/{case.algorithm}.yaml", case.overrides)
    cluster = folder / f"{case.kind}-{case.hosts}x{case.devices}.yaml"
    one = (ROOT / f"clusters/{case.kind}.yaml").read_text().replace("hosts: 1", f"hosts: {case.hosts}")
    cluster.write_text(one.replace("devices_per_host: 8", f"devices_per_host: {case.devices}"))
    about = case.algorithm, case.models, case.devices * case.hosts, case.pins
    forget()
    began = time.process_time()
    try:
        plan = hflow.compile(graph, cluster, case.pins, budget_s=budget_s)
    except hflow.HflowError as error:
        if not {d.code for d in error.diagnostics} <= NOTHING_FITS:
            raise
        return Measured(*about, since(began))
    told = plan.search.searched_gap, plan.search.explored, plan.step_time_s
    return Measured(*about, since(began), *told)


def since(began: float) -> float:
    return round(time.process_time() - began, 3)


def forget() -> None:
    """Empty the compiler's caches."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hflow."):
            for value in vars(module).values():
                clear = getattr(value, "cache_clear", None)
                if callable(clear):
                    clear()


def show(found: Measured) -> None:
    """Print a line of the table."""
    gap = "no fit" if found.gap is None else f"{100 * found.gap:.2f}"
    plans = "" if found.explored is None else str(found.explored)
    told = f"{found.gpus:>5}{found.seconds:>8.2f}{gap:>8}{plans:>8}"
    print(f"{found.algorithm:<24}{told}  {' '.join((found.models, *found.pins))}", flush=True)


def report(found: Sequence[Measured]) -> dict[str, object]:
    """`gap_0`: the share of cases with a plan whose gap is 0."""
    seconds, planned = sorted(m.seconds for m in found), [m for m in found if m.gap is not None]
    return {
        "benchmark": "further_cases",
        "gap_0": sum(m.gap == 0 for m in planned) / max(1, len(planned)),
        "total_s": round(sum(seconds), 3),
        "p50_s": median(seconds),
        "p95_s": seconds[int(0.95 * (len(seconds) - 1))],
        "slowest_s": seconds[-1],
        "cases": [asdict(m) for m in found],
    }


if __name__ == "__main__":
    main()
