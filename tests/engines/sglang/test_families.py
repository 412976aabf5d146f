"""Models of each family on a real SGLang server, against transformers: tokens and log-probs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hflow.runtime.engines.sglang.server import Server
from tests.engines.models import Folders, load_hf, some_prompts
from tests.engines.sglang.servers import options
from tests.installed import needs_sglang

pytestmark = [needs_sglang, pytest.mark.slow, pytest.mark.timeout(400)]
NEW_TOKENS = 12
LOG_PROBS = 1e-4  # float32, other kernels: attention, norms and rotary positions round differently


@pytest.fixture
def served(request: pytest.FixtureRequest, folders: Folders) -> Iterator[tuple[Server, str]]:
    folder = folders.of(request.param, tied=False)
    server = Server.start(options(folder), lambda _: None)
    yield server, folder
    server.close()


@pytest.mark.matrix(6, cover=False)
@pytest.mark.parametrize(
    "served",
    [
        "llama linear",
        "llama llama3",
        "mistral full",
        "mixtral",
        "phi3 longrope",
        "qwen2 yarn",
        "qwen3",
        "qwen3_moe",
        "qwen3_moe probabilities",
    ],
    indirect=True,
)  # fmt: skip
def test_log_probs_are_those_of_transformers(served: tuple[Server, str]) -> None:
    server, folder = served
    prompts, model = some_prompts(8), load_hf(folder)
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": prompts, "sampling_params": [sampling] * len(prompts), "return_logprob": True}
    answers = server.post("/generate", body)
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 4, "prompts matter"
    for prompt, answer in zip(prompts, answers, strict=True):
        row = torch.tensor([prompt + answer["output_ids"]])
        with torch.inference_mode():
            log_p = model(row).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert log_p.argmax(-1).tolist() == answer["output_ids"]
        expected = log_p.gather(-1, row[0, len(prompt) :, None])[:, 0]
        found = torch.tensor([log_prob for log_prob, _, _ in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(found, expected, atol=LOG_PROBS, rtol=0)
