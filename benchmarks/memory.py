"""Memory of a device: what a plan says beside what torch's allocator held.

    python benchmarks/memory.py [--only NAME …] [--save]

Each case is a node of GRPO or PPO, with a small model and rows of the greatest length that share no prompt,
run by the engine as planned, on one or two processes. `predicted`: weights, gradients, optimizer, and what
the node needs while it runs, from the plan; `measured`: the most bytes that the allocator held, from the
first weight to the node's end, on the fullest rank, most of its second to fourth run. `ratio` is predicted /
measured. What allocators round up, the Python process itself and snapshots for checkpoints are no part of
either. The last line is one JSON object; with --save it also goes to benchmarks/results/.

The profiler records what threads allocate and free that run under it. Threads of a collective do not, once
their work is done, and may be the last to let go of a tensor: a sum of events would count it as held to the
end. torch's allocator itself counts what all threads do if its flag `caffe2_report_cpu_memory_usage` is set;
its total stands in every event.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import machine
from torch._C._profiler import _EventType
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

import hflow
from hflow.cost.resident_memory import resident_bytes
from hflow.graph.infer.kinds.train import frozen_patterns
from hflow.plan.plan import Plan
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.rows import Rows, from_lists
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.new_model import new_model

ROOT = Path(__file__).resolve().parent
PROMPT, RESPONSE, ROWS, RUNS = 128, 256, 8, 3
WORDS = "".join(map(chr, range(0x4E00, 0x4E00 + 4000)))  # an alphabet of this many tokens
GRPO: tuple[str, ...] = (
    "params.batch=4", "params.group=2", f"params.minibatch={ROWS}", "params.holdout=4", "params.kl_coef=0.01",
    f"params.max_new_tokens={RESPONSE}", f"nodes.prompts.with.max_prompt_tokens={PROMPT}",
)  # fmt: skip
BF16 = ("models.actor.dtype=bf16", "models.ref.dtype=bf16")
ADAPTER = ("models.actor.adapter=8",)


@dataclass(frozen=True)
class Case:
    """`node` of GRPO as `pin` says, on as many processes; `model`: options of `new_model`."""

    node: str
    pin: str
    more: tuple[str, ...] = ()
    model: tuple[tuple[str, Any], ...] = ()

    @property
    def processes(self) -> int:
        return 2 if "@0-1" in self.pin else 1


TRAIN, SCORE, ROLLOUT = "actor_train", "ref_logprobs", "rollout"
QWEN3, TIED, WORDY = (("family", "qwen3"),), (("tied", True),), (("alphabet", WORDS),)
EXPERTS = ("family", "qwen3_moe"), ("ffn", 256)
GEMMA2 = ("family", "gemma2"), *TIED
GPT_OSS = ("family", "gpt_oss"), ("ffn", 256)
CASES = {
    "f32": Case(TRAIN, "tp1,micro4,no-recompute@0"),
    "f32 one row at a time": Case(TRAIN, "tp1,micro1,no-recompute@0"),
    "f32 recompute": Case(TRAIN, "tp1,micro4,recompute@0"),
    "bf16": Case(TRAIN, "tp1,micro4,no-recompute@0", BF16),
    "bf16 recompute": Case(TRAIN, "tp1,micro4,recompute@0", BF16),
    "f32 tied": Case(TRAIN, "tp1,micro4,no-recompute@0", model=TIED),
    "f32 qwen3": Case(TRAIN, "tp1,micro4,no-recompute@0", model=QWEN3),
    "f32 frozen layers": Case(
        TRAIN, "tp1,micro4,no-recompute@0", ("nodes.actor_train.with.freeze=[embed*, layers.0.*]",)
    ),
    "f32 many words": Case(TRAIN, "tp1,micro2,no-recompute@0", model=WORDY),
    "adapter f32": Case(TRAIN, "tp1,micro4,no-recompute@0", ADAPTER),
    "adapter f32 recompute": Case(TRAIN, "tp1,micro4,recompute@0", ADAPTER),
    "adapter bf16": Case(TRAIN, "tp1,micro4,no-recompute@0", (*BF16, *ADAPTER)),
    "adapter bf16 tp2": Case(TRAIN, "tp2,micro4,no-recompute@0-1", (*BF16, *ADAPTER)),
    "f32 zero1": Case(TRAIN, "dp2,micro2,zero1,no-recompute@0-1"),
    "bf16 zero1 recompute": Case(TRAIN, "dp2,micro2,zero1,recompute@0-1", BF16),
    "f32 tp2": Case(TRAIN, "tp2,micro4,no-recompute@0-1"),
    "f32 tp2 sp": Case(TRAIN, "tp2,sp,micro4,no-recompute@0-1"),
    "f32 cp2": Case(TRAIN, "cp2,micro4,no-recompute@0-1"),
    "bf16 cp2 recompute": Case(TRAIN, "cp2,micro4,recompute@0-1", BF16),
    "f32 experts": Case(TRAIN, "tp1,micro4,no-recompute@0", model=EXPERTS),
    "bf16 experts recompute": Case(TRAIN, "tp1,micro4,recompute@0", BF16, EXPERTS),
    "f32 experts ep2": Case(TRAIN, "dp2,ep2,micro4,no-recompute@0-1", model=EXPERTS),
    "f32 experts cp2": Case(TRAIN, "cp2,micro4,no-recompute@0-1", model=EXPERTS),
    "f32 experts tp2 sp": Case(TRAIN, "tp2,sp,micro4,no-recompute@0-1", model=EXPERTS),
    "f32 gpt_oss": Case(TRAIN, "tp1,micro4,no-recompute@0", model=GPT_OSS),
    "bf16 gpt_oss tp2": Case(TRAIN, "tp2,micro4,no-recompute@0-1", BF16, GPT_OSS),
    "f32 gpt_oss cp2": Case(TRAIN, "cp2,micro4,no-recompute@0-1", model=GPT_OSS),
    "bf16 gpt_oss tp2 sp": Case(TRAIN, "tp2,sp,micro4,no-recompute@0-1", BF16, GPT_OSS),
    "f32 gemma2": Case(TRAIN, "tp1,micro4,no-recompute@0", model=GEMMA2),
    "f32 gemma2 cp2": Case(TRAIN, "cp2,micro4,no-recompute@0-1", model=GEMMA2),
    "bf16 gemma2 tp2 sp": Case(TRAIN, "tp2,sp,micro4,no-recompute@0-1", BF16, GEMMA2),
    "f32 pp2": Case(TRAIN, "pp2,micro2,no-recompute@0-1"),
    "score f32": Case(SCORE, "tp1,micro8@0"),
    "score bf16 many words": Case(SCORE, "tp1,micro8@0", BF16, WORDY),
    "generate f32": Case(ROLLOUT, "tp1,micro8@0"),
    "generate bf16 tp2": Case(ROLLOUT, "tp2,micro8@0-1", BF16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a device, predicted and measured.")
    parser.add_argument("--only", nargs="*", default=list(CASES), metavar="NAME", help="cases; default: all")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/memory-DATE.json")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name in options.only:
        found[name] = measured(CASES[name])
        print(f"{name:24} {found[name]}", flush=True)
    report = {"benchmark": "memory", "rows": ROWS, "tokens": PROMPT + RESPONSE, **machine(), "cases": found}
    line = json.dumps(report)
    if options.save:
        (ROOT / f"results/memory-{report['date']}.json").write_text(line + "\n")
    print(line)


def measured(case: Case) -> dict[str, float]:
    """MB predicted and measured, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        new_model(model, **{**_SIZES, **dict(case.model)})
        overrides = [*GRPO, *case.more, f"params.model={model}"]
        plan = hflow.compile(hflow.load("grpo", overrides), "local4", [f"{case.node}={case.pin}"])
        result = get_context("spawn").SimpleQueue()
        arguments = case.processes, f"{folder}/store", plan, case.node, result
        spawn(_on_rank, arguments, nprocs=case.processes)
        held = max(result.get() for _ in range(case.processes))
    predicted = predicted_bytes(plan, case.node)
    return {
        "predicted": round(predicted / 1e6, 1),
        "measured": round(held / 1e6, 1),
        "ratio": round(predicted / held, 3),
    }


_SIZES: dict[str, Any] = {
    "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 768, "max_positions": 512,
}  # fmt: skip


def predicted_bytes(plan: Plan, name: str) -> int:
    """Of a device, beside other nodes and snapshots."""
    own, node = plan.node(name), plan.graph.node(name)
    model = plan.graph.model_of(node)
    trains, freeze = own.kind == "train", frozen_patterns(node) if own.kind == "train" else ()
    shape = plan.shapes[model.name]
    return own.memory_bytes + resident_bytes(shape, model.dtype, own.mesh, trains, own.strategy, freeze)


def _on_rank(rank: int, processes: int, store: str, plan: Plan, name: str, result: Any) -> None:
    torch.set_num_threads(1)
    _count_all_threads()
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=processes)
    node, own = plan.graph.node(name), plan.node(name)
    model = plan.graph.model_of(node)

    new_group: Any = dist.new_group

    engine = MegatronModel(
        model, plan.shapes[model.name], own.sharding, rank, new_group, load_tokenizer(model.path),
        torch.device("cpu"), node.options if node.op == "train" else None, own.strategy,
        frozen_patterns(node) if node.op == "train" else (),
    )  # fmt: skip
    dp = own.mesh.coordinates(rank)["dp"]
    share = len(_inputs(node.op)["prompt" if node.op == "generate" else "tokens"]) // own.mesh.dp
    inputs = {k: v.slice(dp * share, (dp + 1) * share) for k, v in _inputs(node.op).items()}
    call = EngineCall(node, own, dp * share, share, seed=1, step=0, stream=0)
    engine.run(call, inputs)
    result.put(max(_most_held(lambda: engine.run(call, inputs)) for _ in range(RUNS)))
    dist.destroy_process_group()


def _count_all_threads() -> None:
    """From now on torch's allocator counts the bytes that it holds, whichever thread allocates and frees."""
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("*c10.*"))
    ctypes.c_bool.in_dll(ctypes.CDLL(str(libraries[0])), "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _most_held(action: Callable[[], Any]) -> int:
    """The most bytes that the allocator has held meanwhile, with all that was allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    events: list[Any] = profiled.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    most = 0
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            most = max(most, event.extra_fields.total_allocated)
    return most


def _inputs(op: str) -> dict[str, Rows]:
    """Rows of the greatest length, all of them different."""
    random = torch.Generator().manual_seed(0)
    lists: list[list[int]] = torch.randint(3, 90, (ROWS, PROMPT + RESPONSE), generator=random).tolist()
    if op == "generate":
        return {"prompt": from_lists([row[:PROMPT] for row in lists[: ROWS // 2]])}
    lengths = torch.full((ROWS,), RESPONSE)
    given = {
        "tokens": from_lists(lists),
        "mask": Rows(torch.ones(ROWS * RESPONSE, dtype=torch.bool), lengths),
    }
    if op == "score":
        return given
    log_probs = Rows(torch.full((ROWS * RESPONSE,), -4.0), lengths)
    advantages = Rows(torch.linspace(-1, 1, ROWS))
    return given | {"old_logprobs": log_probs, "ref_logprobs": log_probs, "advantages": advantages}


if __name__ == "__main__":
    main()
