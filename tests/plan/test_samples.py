"""Which values a table of samples has, of graphs of several kinds."""

from __future__ import annotations

import pytest

import hflow
from hflow.graph.ir import Ref
from hflow.plan.samples import SampleTable, data_rows, sample_tables, sampled_rows

COLUMNS = {  # by hand, from the graph files: what is computed of each text
    "grpo": {
        "rollout": "reward advantage logprob prompts.answer*8 reward.score advantages.advantages",
    },
    "dapo": {
        "sampling": "reward advantage logprob sampling.score overlong.score total.score"
        " advantages.advantages",
    },
    "ppo": {
        "rollout": "reward advantage/mean logprob reward.score values.score shaped.rewards/mean shaped.kl"
        " gae.advantages/mean gae.returns/mean advantages.advantages/mean",
    },
    "remax": {
        "rollout": "reward advantage logprob prompts.answer reward.score shaped.rewards shaped.kl"
        " advantages.advantages",
        "greedy": "logprob prompts.answer greedy_reward.score",
    },
    "tool_grpo": {
        "turn_3": "reward advantage logprob prompts.answer*8 tool_1.observation tool_2.observation"
        " reward.score advantages.advantages",
    },
    "dpo": {"pairs": ""},
    "sft": {"examples": ""},
}


def tables(name: str) -> dict[str, SampleTable]:
    return {table.node: table for table in sample_tables(hflow.load(name))}


@pytest.mark.parametrize("name", COLUMNS)
def test_tables(name: str) -> None:
    found = {
        node: {
            column.name + "/mean" * (column.how == "mean") + f"*{column.repeats}" * (column.repeats > 1)
            for column in table.columns
        }
        for node, table in tables(name).items()
    }
    assert found == {node: set(columns.split()) for node, columns in COLUMNS[name].items()}


def test_texts_and_their_rows() -> None:
    grpo, dapo, dpo = (next(iter(tables(name).values())) for name in ("grpo", "dapo", "dpo"))
    assert (grpo.tokens, grpo.mask, grpo.tokenizer) == (
        Ref("rollout", "tokens"),
        Ref("rollout", "mask"),
        "actor",
    )
    assert (grpo.rows, grpo.data, grpo.data_repeats) == (1024, "prompts", 8)
    assert (dapo.tokens, dapo.mask, dapo.data) == (Ref("sampling", "tokens"), Ref("sampling", "mask"), "")
    assert (dpo.data, dpo.data_repeats) == ("pairs", 2)


def test_each_row_is_handed_over_by_one_device() -> None:
    """Rows split over dp2, where each half lies on both ranks of tp2; a score is on the last stage only."""
    graph = hflow.load("grpo", "params.model=shape:qwen2.5-0.5b")
    pins = ["rollout=tp2,dp2@0-3", "ref_logprobs=pp2@0-1", "actor_train=dp2@2-3"]
    plan = hflow.compile(graph, "h100x8", pins)
    assert sampled_rows(plan, Ref("rollout", "tokens")) == {0: (0, 512), 2: (512, 1024)}
    assert sampled_rows(plan, Ref("ref_logprobs", "logprobs")) == {1: (0, 1024)}
    drawn = sorted(data_rows(plan, "prompts").values())
    assert drawn[0][0] == 0 and drawn[-1][1] == 128
