"""A real SGLang server whose KV cache cannot hold all rows that it has begun."""

from __future__ import annotations

from typing import Any

import pytest

from hflow.runtime.engines.sglang.server import Server
from tests.engines.models import Folders, some_prompts
from tests.engines.sglang.servers import options, short_folder, temporary_files_in
from tests.installed import needs_sglang

pytestmark = [needs_sglang, pytest.mark.slow]

ROWS, NEW_TOKENS = 16, 40
LOGPROB_TOLERANCE = 1e-4  # float32: a row that is read again has its keys from products of other sizes


def answered(server: Server, prompts: list[list[int]], seeds: list[int]) -> list[dict[str, Any]]:
    sampling = [{"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "sampling_seed": seed} for seed in seeds]
    return server.post(
        "/generate", {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    )


def log_probs(answer: dict[str, Any]) -> list[float]:
    return [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]


@pytest.mark.rotating(6)
def test_rows_that_do_not_fit_are_retracted_and_have_the_same_tokens(folders: Folders) -> None:
    prompts, seeds = some_prompts(ROWS), list(range(ROWS))
    room = max(map(len, prompts)) + 5 * NEW_TOKENS
    assert sum(len(prompt) + NEW_TOKENS for prompt in prompts) > 2 * room
    asked = options(folders.of("qwen2", False), max_running=ROWS, max_tokens=room, foresight=0.01)
    with short_folder() as folder, temporary_files_in(folder):
        server = Server.start(asked, lambda _: None)
        try:
            together = answered(server, prompts, seeds)
            alone = [answered(server, [prompt], [seed])[0] for prompt, seed in zip(prompts, seeds)]
        finally:
            server.close()
    assert any(answer["meta_info"]["num_retractions"] for answer in together)
    assert not any(answer["meta_info"]["num_retractions"] for answer in alone)
    assert [a["output_ids"] for a in together] == [a["output_ids"] for a in alone]
    for one, other in zip(together, alone):
        assert log_probs(one) == pytest.approx(log_probs(other), abs=LOGPROB_TOLERANCE)
