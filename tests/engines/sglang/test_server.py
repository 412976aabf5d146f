"""A real SGLang server, asked over its routes; what it generates, against transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hflow.runtime.engines.sglang.options import ServerOptions
from hflow.runtime.engines.sglang.server import Server, ServerError
from hflow.runtime.engines.sglang.share import handle
from tests.engines.models import Folders, load_hf, some_prompts
from tests.engines.sglang.loader import LOADER
from tests.engines.sglang.servers import (
    MAX_LENGTH,
    files_of,
    lives,
    options,
    short_folder,
    temporary_files_in,
    tree_of,
)
from tests.installed import needs_sglang

pytestmark = [needs_sglang, pytest.mark.slow]

NEW_TOKENS = 12
LOGPROB_TOLERANCE = 1e-4  # float32, other kernels: attention and norms round differently


@pytest.fixture(scope="module")
def model(folders: Folders) -> str:
    return folders.of("qwen2", False)


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def server(model: str, told: list[str]) -> Iterator[Server]:
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            patch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
        with temporary_files_in(folder):
            server = Server.start(options(model), told.append)
        yield server
        processes = tree_of(server._tree.pid)  # type: ignore[union-attr]
        shared = files_of(processes)
        server.close()
        server.close()
        assert not any(map(lives, processes)) and list(folder.iterdir()) == []
        assert any("sglang_loads" in file.name for file in shared)  # there is such a file
        assert not any(Path(str(file).removesuffix(" (deleted)")).exists() for file in shared)
    with pytest.raises(ServerError, match="/ready: the server is closed"):
        server.get("/ready")


def generate(server: Server, prompts: list[list[int]], each: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sampling = [{"max_new_tokens": NEW_TOKENS, "ignore_eos": True} | params for params in each]
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    return server.post("/generate", body)


def greedy(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    return [a["output_ids"] for a in generate(server, prompts, [{"temperature": 0}] * len(prompts))]


def hf_greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    answers: list[list[int]] = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def test_greedy_tokens_and_logprobs_are_those_of_transformers(server: Server, model: str) -> None:
    prompts, hf = some_prompts(8), load_hf(model)
    answers = generate(server, prompts, [{"temperature": 0}] * len(prompts))
    tokens = [answer["output_ids"] for answer in answers]
    assert tokens == hf_greedy(hf, prompts)
    assert len({tuple(row) for row in tokens}) > 4  # prompts matter
    for prompt, answer in zip(prompts, answers):
        row = torch.tensor([prompt + answer["output_ids"]])
        with torch.inference_mode():
            logprobs = hf(row).logits[0].log_softmax(-1)
        expected = logprobs[len(prompt) - 1 : -1].gather(-1, row[0, len(prompt) :, None])[:, 0]
        found = torch.tensor([logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(found, expected, atol=LOGPROB_TOLERANCE, rtol=0)


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(server: Server) -> None:
    prompts = some_prompts(16)
    seeded = [{"temperature": 1.0, "sampling_seed": 100 + i} for i in range(16)]
    together = [a["output_ids"] for a in generate(server, prompts, seeded)]
    backwards = [a["output_ids"] for a in generate(server, prompts[::-1], seeded[::-1])][::-1]
    alone = [generate(server, [p], [s])[0]["output_ids"] for p, s in zip(prompts[:4], seeded)]
    assert together == backwards and together[:4] == alone
    same_prompt = [a["output_ids"] for a in generate(server, prompts[:1] * 16, seeded)]
    assert len({tuple(row) for row in same_prompt}) == 16  # seeds matter


@pytest.mark.parametrize("prompt", [1, MAX_LENGTH - 1])
def test_a_request_may_have_all_its_tokens(server: Server, prompt: int) -> None:
    """SGLang shortens silently what comes close to its own limits."""
    body = {"input_ids": [[5] * prompt], "sampling_params": {"max_new_tokens": MAX_LENGTH - prompt}}
    body["sampling_params"] |= {"ignore_eos": True}
    assert len(server.post("/generate", body)[0]["output_ids"]) == MAX_LENGTH - prompt


def test_what_sglang_refuses_is_told_in_its_words(server: Server) -> None:
    with pytest.raises(ServerError, match=r"^/generate: .*input_ids.* \(HTTP 400\)$"):
        server.post("/generate", {})
    with pytest.raises(ServerError, match=r"^/nowhere: Not Found \(HTTP 404\)$"):
        server.post("/nowhere")
    assert server.alive


def test_an_answer_is_not_awaited_for_ever(server: Server) -> None:
    begin = time.monotonic()
    with pytest.raises(ServerError, match="/health_generate: no answer within 0 s"):
        server.get("/health_generate", 0.2)  # takes SGLang a second
    assert time.monotonic() - begin < 1 and server.alive


def test_a_started_server_is_healthy_and_said_how_long_it_took(server: Server, told: list[str]) -> None:
    assert server.alive and server.healthy()
    assert told[0] == "starting SGLang (0 s)" and len(told) >= 3
    assert told == sorted(told, key=lambda text: int(text.split("(")[1].split()[0]))


def test_the_limits_are_those_that_were_asked_for(server: Server) -> None:
    info = server.get("/server_info")
    assert info["max_total_num_tokens"] >= 2048 and info["max_running_requests"] == 16
    assert info["attention_backend"] == "torch_native" and info["dtype"] == "float32"


def test_every_socket_is_on_loopback(server: Server) -> None:
    sockets = listening(server)
    assert ("127.0.0.1", server.port) in sockets
    assert {address for address, _ in sockets} == {"127.0.0.1"}


def test_its_processes_talk_to_each_other_in_a_folder_that_only_this_user_reads(server: Server) -> None:
    """They unpickle a part of what they hear there."""
    folder = server._folder.path
    tree = tree_of(server._tree.pid)  # type: ignore[union-attr]
    sockets = {str(c.laddr) for p in tree for c in p.net_connections("unix") if c.laddr}
    assert sockets and all(Path(name).is_relative_to(folder) for name in sockets), sockets
    assert folder.stat().st_mode & 0o077 == 0


def listening(server: Server) -> set[tuple[str, int]]:
    tree = tree_of(server._tree.pid)  # type: ignore[union-attr]
    connections = [c for p in tree for c in p.net_connections("inet")]
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_weights_are_updated_by_the_named_loader(server: Server, model: str) -> None:
    """It halves what it is given."""
    prompts, hf = some_prompts(8), load_hf(model)
    before = greedy(server, prompts)
    name = "lm_head.weight"
    weight = hf.get_parameter(name).detach().clone()
    other = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1
    update(server, name, other * 2)
    with torch.no_grad():
        hf.get_parameter(name).copy_(other)
    assert greedy(server, prompts) == hf_greedy(hf, prompts) != before
    update(server, name, weight * 2)
    assert greedy(server, prompts) == before


def update(server: Server, name: str, tensor: torch.Tensor) -> None:
    assert server.post("/begin_weight_update")["success"]
    handles = [handle(name, tensor)]
    body = {"serialized_named_tensors": handles, "load_format": LOADER, "flush_cache": True}
    assert server.post("/update_weights_from_tensor", body)["success"]
    assert server.post("/end_weight_update")["success"]


def test_generation_is_paused_and_continued(server: Server) -> None:
    server.post("/pause_generation", {"mode": "retract"})
    assert not server._is_ready()
    server.post("/continue_generation")
    assert server._is_ready()
    server.post("/abort_request", {"abort_all": True})
    server.post("/flush_cache")
    assert server.post("/weights_checker", {"action": "checksum"})["success"]


def test_options_that_contradict_each_other_are_refused(model: str) -> None:
    def refused(message: str, **other: Any) -> None:
        with pytest.raises(ValueError, match=message):
            options(model, **other)

    refused("2 ranks on 1 devices", tp=2, devices=("0",))
    refused("cores are for servers on CPUs", devices=("0",), cores=(0,))
    refused("does not hold a request of 64", max_tokens=63)
    refused("only the memory of CUDA devices", sleeps=True)
    assert ServerOptions(model, "bfloat16", 1, ("0",), (), 1, 64, 64, 0, True).weight_loader == ""
