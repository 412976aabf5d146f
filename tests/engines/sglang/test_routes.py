"""The experts that a real server's routers choose, against transformers; and how its answers are read."""

from __future__ import annotations

import threading
from base64 import b64encode
from dataclasses import replace

import numpy as np
import pytest
import torch

from hflow.plan.read_shape import read_shape
from hflow.plan.routes import choices
from hflow.runtime.ends import EndRule
from hflow.runtime.engines.sampler import Sampling
from hflow.runtime.engines.sglang.requests import RequestRow, Response, ask
from hflow.runtime.engines.sglang.routes import served_routes
from hflow.runtime.engines.sglang.server import Server, ServerError
from tests.engines.models import EOS, Folders, load_hf, some_prompts
from tests.engines.sglang.servers import options
from tests.installed import needs_sglang

NEW = 9


@needs_sglang
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.matrix(2, cover=False)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_routes_are_what_transformers_chooses(folders: Folders, family: str) -> None:
    """Of prompts of several lengths, which are read together, and of all response tokens but the last."""
    folder = folders.of(family, False)
    shape, model = read_shape(folder), load_hf(folder)
    assert shape.moe
    rows = [RequestRow(prompt, seed) for seed, prompt in enumerate(some_prompts(6))]
    ends = EndRule.of({}, EOS, lambda _: [])
    sampling = Sampling(NEW, 1.0, seed=5, step=0, stream=0, ends=ends, routes=True)
    server, answered = Server.start(options(folder, tells_routes=True)), dict[int, Response]()
    try:
        ask(server, rows, sampling, answered, threading.Event(), threading.Event())
    finally:
        server.close()
    texts = [row.prompt + answered[number].tokens for number, row in enumerate(rows)]
    told = [answered[number].routes for number in range(len(rows))]
    found = served_routes(told, [len(text) for text in texts], shape)
    assert found.row_lengths.tolist() == [len(text) * choices(shape) for text in texts]
    for row, text in enumerate(texts):
        with torch.no_grad():
            logits = model(torch.tensor([text]), output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(shape.moe.top_k).indices for layer in logits], 1)
        mine = found.slice(row, row + 1).values.view(expected.shape)
        assert (mine[-1] == -1).all()
        assert torch.equal(mine[:-1].sort(-1).values.long(), expected[:-1].sort(-1).values)


def test_layers_without_experts_and_tokens_after_the_end_are_left_out(folders: Folders) -> None:
    shape = read_shape(folders.of("qwen3_moe", False))
    assert shape.moe
    shape = replace(shape, num_layers=3, moe=replace(shape.moe, dense_layers=1, top_k=2))
    whole = np.arange(5 * 3 * 2, dtype=np.int32).reshape(5, 3, 2)
    text = b64encode(whole.tobytes()).decode()
    found = served_routes([text, text], [6, 4], shape)
    assert found.values.dtype == torch.int16 and found.row_lengths.tolist() == [24, 16]
    assert found.slice(0, 1).values.tolist() == [*whole[:, 1:].flatten(), -1, -1, -1, -1]
    assert found.slice(1, 2).values.tolist() == [*whole[:3, 1:].flatten(), -1, -1, -1, -1]
    with pytest.raises(ServerError, match="experts of 5 tokens for a row of 7"):
        served_routes([text], [7], shape)
    with pytest.raises(ServerError, match="experts of 0 tokens"):
        served_routes([None], [2], shape)
    assert len(served_routes([], [], shape)) == 0
