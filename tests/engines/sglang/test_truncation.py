"""Truncated sampling on a real server: the support, the frequencies and the ends that every engine has."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import hflow
from hflow.graph.infer.kinds.generate import END_TOKEN, LENGTH, STOP
from hflow.graph.ir import Output
from hflow.graph.types import Truncation
from hflow.plan.replicas import instance_of
from hflow.runtime.engines.protocol import EngineCall, Result
from hflow.runtime.engines.sglang.engine import SglangModel
from hflow.runtime.kept import KeptSets
from hflow.runtime.rows import from_lists
from hflow.runtime.tokenizer import Tokenizer, load_tokenizer
from hflow.runtime.worker.world import World
from tests.engines.models import EOS, Folders, load_hf, type_of
from tests.engines.test_truncation import of_transformers
from tests.installed import needs_sglang

pytestmark = [needs_sglang, pytest.mark.slow, pytest.mark.timeout(1800)]
COUNT, NEW, HEAT, MOST = 400, 6, 0.8, 11
PROMPTS = [[7, 12, 5], [9, 4]]
SHAPE = {"top_k": 14, "top_p": 0.9, "min_p": 0.01}
STOPS = {"stop": ["1", "22"], "stop_token_ids": [9]}


@pytest.mark.rotating(6)
def test_support_frequencies_and_ends_are_those_of_the_other_engines(folders: Folders) -> None:
    folder = folders.of("qwen2", False)
    overrides = [
        f"params.model={folder}", "nodes.prompts.with.batch=2", f"nodes.rollout.with.n={COUNT}",
        f"nodes.rollout.with.max_new_tokens={NEW}", f"nodes.actor_train.repeat.minibatch={2 * COUNT}",
    ]  # fmt: skip
    plan = hflow.compile(hflow.load("tests/runtime/graphs/grpo_tiny.yaml", overrides), "local1",
                         engines=("rollout=sglang",))  # fmt: skip
    node, own = plan.graph.node("rollout"), plan.node("rollout")
    options = {
        **node.options,
        "temperature": HEAT,
        **SHAPE,
        "max_kept": MOST,
        **STOPS,
        "mask_truncated": True,
    }
    more = tuple(Output(port, type_of(2 * COUNT)) for port in ("kept", "finish"))
    node = replace(node, options=options, outputs=(*node.outputs, *more))
    world = World.join(HashStore(), 0, 1, torch.device("cpu"))
    model, tokenizer = plan.graph.model("actor"), load_tokenizer(folder)
    engine = SglangModel(
        model, plan.shapes["actor"], instance_of(node, own.sharding).sharding, 0, world.cores, world.group,
        tokenizer, world.device, [(node, own)], True, 0, plan.graph.seed, threading.Event(), lambda _: None,
    )  # fmt: skip
    try:
        calling = EngineCall(node, own, 0, 2, seed=5, step=0)
        result = engine.run(calling, {"prompt": from_lists(PROMPTS)})
    finally:
        engine.close()
        world.close()
    check(folder, tokenizer, result)


def check(folder: str, tokenizer: Tokenizer, result: Result) -> None:
    made = result.outputs
    tokens, log_probs = (made[p].values.split(made[p].row_lengths.tolist()) for p in ("tokens", "logprobs"))
    lengths, hf = made["mask"].row_lengths, load_hf(folder)
    with torch.no_grad():  # padding comes after what it could change
        every_logits = hf(made["tokens"].padded().long()).logits
    sets = KeptSets(made["kept"], lengths)
    firsts: list[list[int]] = [[], []]
    overflown, ends = 0, list[int]()
    for number, row in enumerate(tokens):
        which, length = number // COUNT, int(lengths[number])
        response = row[-length:].tolist()
        firsts[which].append(response[0])
        texts = [tokenizer.decode([response[: n + 1]])[0] for n in range(length)]
        stops = [t in (9, EOS) or "1" in text or "22" in text for t, text in zip(response, texts)]
        assert not any(stops[:-1]) and (stops[-1] or length == NEW), (response, texts)
        ends.append(END_TOKEN if response[-1] == EOS else STOP if stops[-1] else LENGTH)
        logits = every_logits[number, len(row) - length - 1 : len(row) - 1]
        inside = of_transformers(logits, HEAT, Truncation.of(SHAPE))
        every = (logits / HEAT).masked_fill(~inside, -torch.inf).log_softmax(-1)
        wanted = every.gather(1, row[-length:, None].long()).squeeze(1)
        assert torch.allclose(log_probs[number], wanted, atol=1e-4)  # float32, other kernels
        large = bool((inside.sum(1) > MOST).any())
        overflown += large
        told = [[i for i in ids if i >= 0] for ids in sets.take(torch.tensor([number])).padded().tolist()]
        assert told == ([[]] * length if large else [s.nonzero().squeeze(1).tolist() for s in inside])
        kept_row = not large and ends[-1] != LENGTH
        assert made["mask"].slice(number, number + 1).values.tolist() == [kept_row] * length
    assert made["finish"].values.tolist() == ends and {LENGTH, STOP} <= {*ends}
    assert result.metrics["overflown_rows"] == (overflown, 1.0) and 0 < overflown < len(ends)
    assert result.metrics["truncated_rows"] == (ends.count(LENGTH), 1.0)
    for prompt, drawn in zip(PROMPTS, firsts):
        with torch.no_grad():
            logits = hf(torch.tensor([prompt])).logits[:, -1]
        inside = of_transformers(logits, HEAT, Truncation.of(SHAPE))[0]
        p = (logits[0] / HEAT).masked_fill(~inside, -torch.inf).softmax(-1)
        seen = torch.bincount(torch.tensor(drawn), minlength=len(p))
        assert seen[~inside].sum() == 0
        chi_square = ((seen - COUNT * p)[inside] ** 2 / (COUNT * p[inside])).sum()
        freedom = int(inside.sum()) - 1  # its 99.9 % quantile, by the Wilson-Hilferty formula
        assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
