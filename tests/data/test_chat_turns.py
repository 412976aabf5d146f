"""Later turns through a chat template: tokens of the whole conversation, as transformers writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hflow.graph.ir import Node, Output
from hflow.graph.types import Dim, Factor, ValueType
from hflow.runtime.chat.observations import Observations, observations, turn_end
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.template import ChatTemplate
from hflow.runtime.engines.protocol import NodeError, Result
from hflow.runtime.engines.rollout import Rollout
from hflow.runtime.engines.sampler import Answers, Sampling
from hflow.runtime.rows import Rows, from_lists, from_strings
from hflow.runtime.tokenizer import Tokenizer
from hflow.runtime.tools.new_model import ALPHABET, character_tokenizer
from tests.data.chat_styles import CALLED, THOUGHTS, asked, said, tokenizer_of, with_chat
from tests.data.python_engine import call

STYLES = ["chatml", "llama3", "mistral", "gemma2", "phi", "zephyr", "command_r"]
DATE = "2026-11-23"
SAMPLED = "ok"


def whole(tokenizer: Tokenizer, messages: list[dict[str, Any]], **arguments: Any) -> list[int]:
    """As transformers does it, from the beginning."""
    args = {"date_string": "today", **arguments}
    text = tokenizer.fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **args)
    return tokenizer.encode([str(text)])[0]


def options(role: str = "user", most: int = 999, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 9, "temperature": 1.0, "max_observation_tokens": most, "role": role, **more}


def further(
    tokenizer: Tokenizer, sampled: list[list[int]], texts: list[str], given: dict[str, Any]
) -> Result:
    """A later turn after `sampled`, which answered "1 + 2?"; the model then says `ok` and the end."""
    dims = (Dim((Factor("batch", len(texts), "prompts"),)),)
    outputs = tuple(Output(port, ValueType("i32", dims)) for port in ("tokens", "logprobs", "mask", "text"))
    node = Node("answer", "generate", outputs=outputs, options=given)
    answer = [*tokenizer.encode([SAMPLED])[0], tokenizer.eos_id]

    def sampler(prompts: Rows, ids: torch.Tensor, sampling: Sampling) -> Callable[[], Answers]:
        tokens = from_lists([answer for _ in ids])
        return lambda: Answers(tokens, Rows(torch.zeros(len(tokens.values)), tokens.lengths))

    prompt = whole(tokenizer, [asked("1 + 2?")])
    lengths = torch.tensor([len(s) for s in sampled])
    total = int(lengths.sum())
    inputs = {
        "tokens": from_lists([[*prompt, *s] for s in sampled]),
        "mask": Rows(torch.ones(total, dtype=torch.bool), lengths),
        "logprobs": Rows(-torch.ones(total), lengths),
        "observation": from_strings(texts),
    }
    return Rollout(call(node, (0, len(texts))), sampler, 9999, tokenizer, 0, 0).begin(inputs)()


@pytest.mark.parametrize("style", STYLES)
def test_a_conversation_of_turns_is_that_of_transformers(style: str) -> None:
    tokenizer = tokenizer_of(style)
    end = turn_end(ChatTemplate(tokenizer, date=DATE))
    says = "3" if style != "mistral" else " 3"
    sampled = [[*tokenizer.encode([says])[0], end], tokenizer.encode([says])[0], [end]]
    result = further(tokenizer, sampled, ["And 2 + 2?", "And 2 + 2?", ""], options())
    ended, cut, finished = result.outputs["tokens"].lists()
    expected = whole(tokenizer, [asked("1 + 2?"), said("3"), asked("And 2 + 2?")])
    answer = [*tokenizer.encode([SAMPLED])[0], tokenizer.eos_id]
    assert ended == [*expected, *answer]
    assert cut == ended, "a turn that was cut short is ended, and nothing else differs"
    assert finished == [*whole(tokenizer, [asked("1 + 2?")]), end]
    mask = result.outputs["mask"].lists()
    added = len(expected) - len(whole(tokenizer, [asked("1 + 2?")])) - len(sampled[0])
    assert mask[0] == [1] * len(sampled[0]) + [0] * added + [1] * len(answer)
    assert mask[1] == [1] * len(sampled[1]) + [0] * (added + 1) + [1] * len(answer)


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}], ids=["thinking", "without"])
def test_results_of_tools_keep_the_thought_before_them(arguments: dict[str, Any]) -> None:
    tokenizer = tokenizer_of("qwen3")
    given = options("tool", template_args=arguments)
    thought = THOUGHTS[1]["content"]
    sampled = [*tokenizer.encode([thought])[0], tokenizer.eos_id]
    written = observations(given, tokenizer)
    assert written
    written.check()
    (tokens,) = further(tokenizer, [sampled], ["17"], given).outputs["tokens"].lists()
    talk = [asked("1 + 2?"), said(thought), {"role": "tool", "content": "17"}]
    expected = whole(tokenizer, talk, **arguments)
    assert tokens[: len(expected)] == expected


def test_what_would_be_rewritten_or_left_out_is_refused() -> None:
    qwen, zephyr = tokenizer_of("qwen3"), tokenizer_of("zephyr")
    with pytest.raises(
        ChatProblem, match="takes thoughts out of turns that a message of role `user` follows"
    ):
        Observations(ChatTemplate(qwen), "user").check()
    with pytest.raises(ChatProblem, match="does not write a message of role `tool`"):
        Observations(ChatTemplate(zephyr), "tool").check()
    with pytest.raises(ChatProblem, match="takes thoughts out"):
        Observations(ChatTemplate(tokenizer_of("deepseek_r1")), "user").check()
    dated = with_chat(
        character_tokenizer(ALPHABET), "chatml",
        "{% for m in messages %}{{ m.role + m.content + eos_token + strftime_now('%Y') }}{% endfor %}",
    )  # fmt: skip
    with pytest.raises(ChatProblem, match="writes the date between two turns"):
        Observations(ChatTemplate(dated), "user").check()
    phi = tokenizer_of("phi")
    with pytest.raises(ChatProblem, match=r"ends the assistant's turn with '<\|end\|>"):
        turn_end(ChatTemplate(Tokenizer(phi.fast, phi.pad_id, phi.pad_id)))
    for style in STYLES:
        Observations(ChatTemplate(tokenizer_of(style), date=DATE), "user").check()


def test_long_observations_are_cut_and_the_template_is_not() -> None:
    tokenizer = tokenizer_of("chatml")
    around = len(whole(tokenizer, CALLED[:1] + [said("3"), {"role": "tool", "content": ""}]))
    around -= len(whole(tokenizer, CALLED[:1])) + 2
    sampled = [[*tokenizer.encode(["3"])[0], tokenizer.eos_id]] * 2
    result = further(tokenizer, sampled, ["x" * 50, "x" * 7], options("tool", around + 7))
    for tokens in result.outputs["tokens"].lists():
        talk = [*CALLED[:1], said("3"), {"role": "tool", "content": "x" * 7}]
        expected = whole(tokenizer, talk)
        assert tokens[: len(expected)] == expected
    assert result.metrics["cut_observations"] == (1, 1)
    with pytest.raises(
        NodeError, match=f"around an observation has {around} tokens, `max_observation_tokens` is 9"
    ):
        further(tokenizer, sampled, ["x", "x"], options("tool", 9))
    with pytest.raises(NodeError, match="observation of row 1: .* no token for 'é'"):
        further(tokenizer, sampled, ["x", "é"], options("tool"))
