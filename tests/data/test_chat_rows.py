"""Data nodes of conversations: tokens, and masks against texts in which a hand marked what is learned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hflow.graph.ir import Node, Output
from hflow.graph.types import Dim, Factor, ValueType
from hflow.runtime.chat import rows as chat_rows
from hflow.runtime.chat.messages import tools_in
from hflow.runtime.chat.rows import CHUNK
from hflow.runtime.engines.protocol import NodeError, Result
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.rows import Rows
from hflow.runtime.tokenizer import Tokenizer
from hflow.runtime.tools.new_model import ALPHABET, character_tokenizer
from tests.data.chat_styles import (
    CALLED,
    ONE,
    SYSTEM,
    THOUGHTS,
    TOOLS,
    TWO,
    asked,
    said,
    template_text,
    tokenizer_of,
    with_chat,
)
from tests.data.python_engine import call

DATE = "2026-11-23"
MARK = re.compile(r"«(.*?)»", re.DOTALL)
S, E = "<|im_start|>", "<|im_end|>"


def chat_node(
    folder: Path, rows: list[dict[str, Any]], k: int | None = None, prompts: bool = False, **options: Any
) -> Node:
    """`prompts`: only a column of prompts."""
    file = folder / "rows.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = Factor("batch", len(rows), "prompts")
    all_rows = Dim((batch, Factor("pair", k, "prompts")) if k else (batch,))
    ragged = {name: Dim((Factor(name, 9999, "prompts"),), ragged=True) for name in ("prompt", "seq", "resp")}
    types = {
        "prompt": ValueType("i32", (Dim((batch,)), ragged["prompt"])),
        "tokens": ValueType("i32", (all_rows, ragged["seq"])),
        "mask": ValueType("bool", (all_rows, ragged["resp"])),
    }
    kept = {port: type_ for port, type_ in types.items() if port == "prompt" or not prompts}
    defaults: dict[str, Any] = {
        "dataset": str(file), "batch": len(rows), "tokenizer": "actor", "shuffle": False, "holdout": 0,
        "size": 1,
        "options": {}, "max_prompt_tokens": 9999, "max_response_tokens": 9999,
        "date": DATE,
    }  # fmt: skip
    outputs = tuple(Output(port, type_) for port, type_ in kept.items())
    return Node("prompts", "data", outputs=outputs, options={**defaults, **options})


def draw(node: Node, tokenizer: Tokenizer, evaluation: bool = False) -> Result:
    return PythonEngine({"actor": tokenizer}).run(call(node, (0, node.options["batch"]), 0, evaluation), {})


def texts(rows: Rows, tokenizer: Tokenizer) -> list[str]:
    return tokenizer.fast.backend_tokenizer.decode_batch(rows.lists(), skip_special_tokens=False)


def marked(result: Result, tokenizer: Tokenizer) -> list[str]:
    """The text of each row, with «» around what is learned."""
    out: list[str] = []
    for tokens, mask in zip(result.outputs["tokens"].lists(), result.outputs["mask"].lists()):
        start, text, inside = len(tokens) - len(mask), "", False
        for number, token in enumerate(tokens):
            learned = number >= start and bool(mask[number - start])
            text += "»" * (inside and not learned) + "«" * (learned and not inside)
            text += tokenizer.fast.backend_tokenizer.decode([token], skip_special_tokens=False)
            inside = learned
        out.append(text + "»" * inside)
    return out


HELPFUL = f"{S}system\nYou are a helpful assistant.{E}\n"
TODAY = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
)
TODAY += "Today Date: 23 Nov 2026\n\n<|eot_id|>"


def header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


WRITTEN = {
    ("chatml", "two"): f"{HELPFUL}{S}user\n1 + 2?{E}\n{S}assistant\n«3{E}»\n"
    f"{S}user\n And 2 + 2? {E}\n{S}assistant\n«4 {E}»",
    ("chatml", "calls"): f"{HELPFUL}{S}user\n1 + 2?{E}\n{S}assistant\n"
    f'«<tool_call>\n{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}\n</tool_call>{E}»\n'
    f"{S}user\n<tool_response>\n3\n</tool_response>{E}\n{S}assistant\n«It is 3.{E}»",
    ("llama3", "two"): f"{TODAY}{header('user')}1 + 2?<|eot_id|>{header('assistant')}«3<|eot_id|>»"
    f"{header('user')}And 2 + 2?<|eot_id|>{header('assistant')}«4<|eot_id|>»",
    ("llama3", "calls"): f"{TODAY}{header('user')}1 + 2?<|eot_id|>{header('assistant')}"
    f'«{{"name": "add", "parameters": {{"a": 1, "b": 2}}}}<|eot_id|>»{header("ipython")}"3"<|eot_id|>'
    f"{header('assistant')}«It is 3.<|eot_id|>»",
    ("mistral", "two"): "<s>[INST] 1 + 2?[/INST]« 3</s>»[INST]  And 2 + 2? [/INST]« 4</s>»",
    (
        "mistral",
        "calls",
    ): '<s>[INST] 1 + 2?[/INST]«[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, '
    '"id": "call12345"}]</s>»[TOOL_RESULTS] {"content": 3}[/TOOL_RESULTS]« It is 3.</s>»',
    (
        "gemma2",
        "two",
    ): "<bos><start_of_turn>user\n1 + 2?<end_of_turn>\n<start_of_turn>model\n«3<end_of_turn>»\n"
    "<start_of_turn>user\nAnd 2 + 2?<end_of_turn>\n<start_of_turn>model\n«4<end_of_turn>»",
    ("phi", "two"): "<|user|>\n1 + 2?<|end|>\n<|assistant|>\n«3<|end|>»\n"
    "<|user|>\n And 2 + 2? <|end|>\n<|assistant|>\n«4 <|end|>»",
    ("command_r", "two"): "<BOS_TOKEN>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>1 + 2?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«3<|END_OF_TURN_TOKEN|>»"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>And 2 + 2?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«4<|END_OF_TURN_TOKEN|>»",
    ("zephyr", "two"): "<|user|>\n1 + 2?</s>\n<|assistant|>\n«3</s>»\n"
    "<|user|>\n And 2 + 2? </s>\n<|assistant|>\n«4 </s>»",
    ("marked", "two"): f"{S}user\n1 + 2?{E}\n{S}assistant\n«3{E}»\n"
    f"{S}user\n And 2 + 2? {E}\n{S}assistant\n«4 {E}»",
}
TALKS = {"two": TWO, "calls": CALLED}


@pytest.mark.parametrize("style,talk", WRITTEN)
def test_what_is_learned_is_what_a_hand_marked(tmp_path: Path, style: str, talk: str) -> None:
    tokenizer, written = tokenizer_of(style), WRITTEN[style, talk]
    rows = [{"messages": TALKS[talk]}]
    result = draw(chat_node(tmp_path, rows, messages="messages"), tokenizer)
    assert marked(result, tokenizer) == [written]
    (prompt,) = texts(result.outputs["prompt"], tokenizer)
    assert prompt == written.partition("«")[0]
    learned = sum(len(tokenizer.encode([part])[0]) for part in MARK.findall(written))
    total = len(tokenizer.encode([written.replace("«", "").replace("»", "")])[0])
    assert result.metrics["learned_tokens"] == (learned, total)


@pytest.mark.parametrize("style", ["chatml", "marked"])
def test_only_the_last_turn_is_learned_where_that_is_asked(tmp_path: Path, style: str) -> None:
    node = chat_node(tmp_path, [{"messages": TWO}], messages="messages", learn="last")
    written = WRITTEN[style, "two"]
    first = MARK.search(written)
    assert first
    expected = written.replace(first[0], first[1], 1)
    assert marked(draw(node, tokenizer_of(style)), tokenizer_of(style)) == [expected]


THINKING = f"{S}user\n1 + 2?{E}\n{S}assistant\n«<think>\none and two\n</think>\n\n3{E}»"
LATER = (
    f"{S}user\n1 + 2?{E}\n{S}assistant\n3{E}\n{S}user\nAnd 2 + 2?{E}\n{S}assistant\n"
    f"«<think>\ntwo and two\n</think>\n\n4{E}»"
)


def test_a_template_that_rewrites_earlier_turns_is_refused_or_learned_by_turns(tmp_path: Path) -> None:
    tokenizer, rows = tokenizer_of("qwen3"), [{"messages": THOUGHTS}]
    with pytest.raises(
        NodeError, match=r"row 0 of .*: the chat template rewrites message 1.*'<think>\\none"
    ) as caught:
        draw(chat_node(tmp_path, rows, messages="messages"), tokenizer)
    assert caught.value.code == "HF403" and "per_turn: true" in caught.value.message
    last = draw(chat_node(tmp_path, rows, messages="messages", learn="last"), tokenizer)
    assert marked(last, tokenizer) == [LATER]
    node = chat_node(tmp_path, rows, messages="messages", per_turn=True)
    assert marked(draw(with_rows(node, 2), tokenizer), tokenizer) == [THINKING, LATER]


def with_rows(node: Node, count: int, **options: Any) -> Node:
    return Node(node.name, node.op, outputs=node.outputs, options={**node.options, "batch": count, **options})


def test_without_thinking_every_turn_has_the_empty_thought_of_its_prompt(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3")
    options: dict[str, Any] = {"messages": "messages", "template_args": {"enable_thinking": False}}
    result = draw(chat_node(tmp_path, [{"messages": ONE}], **options), tokenizer)
    none = "<think>\n\n</think>\n\n"
    assert marked(result, tokenizer) == [f"{S}user\n1 + 2?{E}\n{S}assistant\n{none}«3{E}»"]
    with pytest.raises(NodeError, match="message 1 not after its own prompt"):  # which says to think nothing
        (tmp_path / "rows.jsonl").unlink()
        draw(chat_node(tmp_path, [{"messages": THOUGHTS[:2]}], **options), tokenizer)


def test_a_prompt_that_a_conversation_does_not_keep_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("deepseek_r1", ALPHABET + "｜▁")
    rows = [{"messages": [asked("1 + 2?"), said("<think>\none and two</think>3")]}]
    with pytest.raises(NodeError, match=r"message 1 not after its own prompt .*'<think>") as caught:
        draw(chat_node(tmp_path, rows, messages="messages"), tokenizer)
    assert "chat_template" in caught.value.message
    asks = chat_node(tmp_path, rows, messages="question", prompts=True)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": rows[0]["messages"][:1]}))
    (prompt,) = texts(draw(asks, tokenizer).outputs["prompt"], tokenizer)
    assert prompt == "<｜begin▁of▁sentence｜><｜User｜>1 + 2?<｜Assistant｜><think>\n"


def test_marks_that_leave_out_the_end_or_a_turn_are_refused(tmp_path: Path) -> None:
    text = template_text("marked")
    without_end = text.replace("message.content + '<|im_end|>'", "message.content").replace(
        "'\\n' }}", "'<|im_end|>\\n' }}", 1
    )
    node = chat_node(tmp_path, [{"messages": ONE}], messages="messages")
    with pytest.raises(NodeError, match="without a token that ends responses .*write it inside"):
        draw(node, with_chat(character_tokenizer(ALPHABET), "marked", without_end))
    some = text.replace("{%- generation %}", "{%- generation %}{% endgeneration %}{% generation %}")
    assert marked(
        draw(node, with_chat(character_tokenizer(ALPHABET), "marked", some)), tokenizer_of("marked")
    )
    none = text.replace("{%- generation %}\n", "{%- generation %}{%- endgeneration %}\n", 1)
    none = none.replace("        {%- endgeneration %}\n        {{- '\\n' }}", "        {{- '\\n' }}")
    with pytest.raises(NodeError, match="marks nothing of message 1"):
        draw(node, with_chat(character_tokenizer(ALPHABET), "marked", none))


def test_an_end_that_no_rollout_ends_with_is_refused(tmp_path: Path) -> None:
    phi = tokenizer_of("phi")
    endless = Tokenizer(phi.fast, phi.pad_id, phi.pad_id)
    node = chat_node(tmp_path, [{"messages": ONE}], messages="messages")
    with pytest.raises(NodeError, match="without a token that ends responses .*generation_config.json"):
        draw(node, endless)


def test_system_user_and_response_are_templates_of_the_row(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("chatml")
    rows = [{"question": f"{i} + 1?", "answer": i + 1} for i in range(3)]
    options: dict[str, Any] = {"system": "Be {{ 'brief' }}.", "user": "What is {{ question }}"}
    result = draw(chat_node(tmp_path, rows, response="{{ answer }}", **options), tokenizer)
    expected = [
        f"{S}system\nBe brief.{E}\n{S}user\nWhat is {i} + 1?{E}\n{S}assistant\n«{i + 1}{E}»" for i in range(3)
    ]
    assert marked(result, tokenizer) == expected
    asks = draw(chat_node(tmp_path, rows, prompts=True, **options), tokenizer)
    assert texts(asks.outputs["prompt"], tokenizer) == [text.partition("«")[0] for text in expected]
    assert "learned_tokens" not in asks.metrics
    with pytest.raises(NodeError, match="no field `quest`, which the user template asks for"):
        draw(chat_node(tmp_path, rows, prompts=True, user="{{ quest }}"), tokenizer)


BEST, WORST = (
    [asked("1?"), said("a"), asked("2?"), said("b")],
    [asked("1?"), said("a"), asked("2?"), said("c")],
)
PAIR = f"{HELPFUL}{S}user\n1?{E}\n{S}assistant\na{E}\n{S}user\n2?{E}\n{S}assistant\n"


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"chosen": BEST, "rejected": WORST}, {"messages": ["chosen", "rejected"]}),
        (
            {"prompt": BEST[:3], "chosen": BEST[3:], "rejected": WORST[3:]},
            {"messages": "prompt", "completion": ["chosen", "rejected"]},
        ),
        (
            {"prompt": BEST[:3], "chosen": "b", "rejected": "c"},
            {"messages": "prompt", "completion": ["chosen", "rejected"]},
        ),
        ({"prompt": BEST[:3], "b": "b"}, {"messages": "prompt", "response": ["{{ b }}", "c"]}),
    ],
    ids=["conversations", "completions", "texts", "templates"],
)
def test_pairs_share_their_prompt(tmp_path: Path, row: dict[str, Any], options: dict[str, Any]) -> None:
    tokenizer = tokenizer_of("chatml")
    result = draw(chat_node(tmp_path, [row], k=2, **options), tokenizer)
    assert marked(result, tokenizer) == [f"{PAIR}«b{E}»", f"{PAIR}«c{E}»"]
    assert texts(result.outputs["prompt"], tokenizer) == [PAIR]


def test_pairs_of_different_prompts_are_refused(tmp_path: Path) -> None:
    rows = [{"chosen": [asked("1?"), said("a")], "rejected": [asked("2?"), said("a")]}]
    with pytest.raises(NodeError, match="do not begin with the same prompt"):
        draw(chat_node(tmp_path, rows, k=2, messages=["chosen", "rejected"]), tokenizer_of("chatml"))


def test_equal_pairs_differ_in_nothing_but_are_learned(tmp_path: Path) -> None:
    rows = [{"chosen": BEST, "rejected": BEST}]
    result = draw(chat_node(tmp_path, rows, k=2, messages=["chosen", "rejected"]), tokenizer_of("chatml"))
    assert marked(result, tokenizer_of("chatml")) == [f"{PAIR}«b{E}»"] * 2


@pytest.mark.parametrize("kind", ["list", "column", "json", "file"])
def test_tools_come_from_the_graph_a_column_or_a_file(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_of("chatml")
    tools = {"list": TOOLS, "column": "tools", "json": "tools", "file": str(tmp_path / "tools.json")}[kind]
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    row = {"messages": CALLED, "tools": json.dumps(TOOLS) if kind == "json" else TOOLS}
    result = draw(chat_node(tmp_path, [row], messages="messages", tools=tools), tokenizer)
    given: Any = TOOLS
    expected = tokenizer.fast.apply_chat_template(CALLED, tools=given, tokenize=False)
    assert texts(result.outputs["tokens"], tokenizer) == [str(expected).removesuffix("\n")]


def test_a_file_of_tools_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "tools.json", []
    file.write_text(json.dumps(TOOLS))

    def counted(path: Path) -> Any:
        read.append(path)
        return tools_in(path)

    monkeypatch.setattr(chat_rows, "tools_in", counted)
    rows = [{"messages": [asked(f"{n}?"), said("1")]} for n in range(CHUNK + 1)]
    draw(chat_node(tmp_path, rows, messages="messages", tools=str(file)), tokenizer_of("chatml"))
    assert read == [file]


def test_nulls_of_a_file_of_columns_are_absent(tmp_path: Path) -> None:
    """Parquet gives every message all keys: `'tool_calls' in message` would be true of all."""
    file = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_pylist([{"messages": CALLED}])
    assert "tool_calls" in table.to_pylist()[0]["messages"][0]
    pyarrow.parquet.write_table(table, file)
    for style in ("llama3", "mistral", "chatml"):
        node = chat_node(tmp_path, [{"messages": CALLED}], messages="messages", dataset=str(file))
        assert marked(draw(node, tokenizer_of(style)), tokenizer_of(style)) == [WRITTEN[style, "calls"]]


def test_a_conversation_goes_with_its_beginning_when_rows_are_held_out(tmp_path: Path) -> None:
    """Else the second turn of a held-out conversation would teach the answer to the first."""
    rows = [{"messages": [asked(f"{i}?"), said("a"), asked("more?"), said("b")]} for i in range(4)]
    node = with_rows(chat_node(tmp_path, rows, messages="messages", per_turn=True), 6, holdout=1)
    result = draw(node, tokenizer_of("chatml"))
    held_out = draw(with_rows(node, 1), tokenizer_of("chatml"), evaluation=True)
    question = re.search(r"user\n(\d)\?", marked(held_out, tokenizer_of("chatml"))[0])
    assert question and result.metrics["set_aside_rows"] == (1, 1)
    assert not any(f"user\n{question[1]}?" in text for text in marked(result, tokenizer_of("chatml")))


def test_equal_answers_of_one_conversation_are_rows_of_their_own(tmp_path: Path) -> None:
    rows = [{"messages": [asked("1?"), said("ok"), asked("2?"), said("ok")]}] * 2
    node = with_rows(chat_node(tmp_path, rows, messages="messages", per_turn=True), 2)
    result = draw(node, tokenizer_of("chatml"))
    first, second = marked(result, tokenizer_of("chatml"))
    assert first == f"{HELPFUL}{S}user\n1?{E}\n{S}assistant\n«ok{E}»"
    assert second == f"{first.replace('«', '').replace('»', '')}\n{S}user\n2?{E}\n{S}assistant\n«ok{E}»"
    assert result.metrics["duplicate_rows"] == (2, 1)


@pytest.mark.parametrize(
    ("row", "options", "problem"),
    [
        ({}, {}, "no field `messages`"),
        ({"messages": "1?"}, {}, "field `messages` is str .*list of messages"),
        ({"messages": []}, {}, "an empty list"),
        ({"messages": ["1?"]}, {}, r"`messages\[0\]` is str"),
        (
            {"messages": [{"from": "user", "value": "1?"}]},
            {},
            r"`messages\[0\]` has no `role` .*`value` is `content`",
        ),
        ({"messages": [{"role": "user"}]}, {}, r"`messages\[0\]` has no `content`"),
        ({"messages": [{"role": "user", "content": 1}]}, {}, r"content of `messages\[0\]` is int"),
        ({"messages": [asked("1?")]}, {}, "nothing to learn"),
        ({"messages": [said("1")]}, {}, "begins with the assistant's turn"),
        ({"messages": [SYSTEM, *ONE]}, {"system": "x"}, "message of the system, and `system` says another"),
        (
            {"messages": [asked("1?"), said(f"a{E}b")]},
            {},
            r"message 1, the assistant's, holds `<\|im_end\|>`",
        ),
        ({"messages": [asked("1?"), said("é")]}, {}, "no token for 'é'"),
        ({"messages": [asked("é?"), said("1")]}, {}, "no token for 'é'"),
        ({"messages": [asked("1?"), said("1", score=float("nan"))]}, {}, r"`messages\[1\].score` is nan"),
        ({"messages": ONE, "tools": {"a": 1}}, {"tools": "tools"}, "`tools` is no list of tools"),
        ({"messages": ONE, "tools": "[1"}, {"tools": "tools"}, "holds no list of tools: bad JSON"),
        ({"messages": ONE}, {"tools": "none.json"}, "`none.json` cannot be read"),
        ({"messages": ONE}, {"template_args": {"enable_thinking": True}}, "reads no `enable_thinking`"),
        ({"messages": ONE}, {"chat_template": "none.jinja"}, "`none.jinja` cannot be read"),
        (
            {"messages": ONE[:1], "completion": [asked("x")]},
            {"completion": "completion"},
            "begins with the assistant",
        ),
    ],
)
def test_what_is_no_conversation_is_told_with_its_row(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    rows = [{"messages": ONE, "tools": None, "completion": "1"}, row]
    if "chat_template" in options or "template_args" in options or options.get("tools") == "none.json":
        rows.reverse()
    rows[0 if rows[0] is not row else 1].update({"messages": ONE[:1]} if "completion" in options else {})
    node = chat_node(tmp_path, rows, **{"messages": "messages", **options})
    with pytest.raises(NodeError, match=rf"row {rows.index(row)} of .*: .*{problem}") as caught:
        draw(node, tokenizer_of("chatml"))
    assert caught.value.code == "HF403"


def test_a_prompt_that_ends_with_an_answer_is_refused(tmp_path: Path) -> None:
    node = chat_node(tmp_path, [{"messages": ONE}], messages="messages", prompts=True)
    with pytest.raises(NodeError, match="ends with the assistant's turn"):
        draw(node, tokenizer_of("chatml"))


def subwords(metaspace: bool) -> Tokenizer:
    """A tokenizer that merges, as published ones: byte-level, or with a space put before texts."""
    backend = Backend(models.BPE(unk_token=None if not metaspace else "<unk>"))
    pre: Any = (
        pre_tokenizers.Metaspace(prepend_scheme="first")
        if metaspace
        else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    backend.pre_tokenizer, backend.decoder = pre, decoders.Metaspace() if metaspace else decoders.ByteLevel()
    corpus = ["\n\n user assistant system\n\nhello hello there\n 1 + 2? 3"] * 50 + ["\n\n"] * 99
    letters = pre_tokenizers.ByteLevel.alphabet() if not metaspace else list(ALPHABET)
    trainer: Any = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=letters, special_tokens=["<pad>", "<unk>"]
    )
    backend.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    return with_chat(fast, "chatml", template_text("chatml"))


@pytest.mark.parametrize("metaspace", [False, True], ids=["bytes", "metaspace"])
@pytest.mark.parametrize("answer", ["hello there", "\nhello", "\n\n", " hello"])
def test_the_prompt_has_the_tokens_of_a_rollout_and_nothing_is_put_before_parts(
    tmp_path: Path, metaspace: bool, answer: str
) -> None:
    """Also where the first token of the answer would merge with the last of the prompt."""
    tokenizer = subwords(metaspace)
    result = draw(chat_node(tmp_path, [{"m": [asked("1?"), said(answer)]}], messages="m"), tokenizer)
    (tokens,), (mask,) = result.outputs["tokens"].lists(), result.outputs["mask"].lists()
    prompt = str(
        tokenizer.fast.apply_chat_template([asked("1?")], add_generation_prompt=True, tokenize=False)
    )
    whole = prompt + answer + E
    (asks,) = tokenizer.encode([prompt])
    assert tokens[: len(tokens) - len(mask)] == asks == result.outputs["prompt"].lists()[0]
    assert mask == [1] * len(mask) and tokens[-1] == tokenizer.eos_id
    decode = tokenizer.fast.backend_tokenizer.decode
    (as_one,) = tokenizer.encode([whole])
    assert decode(tokens, skip_special_tokens=False) == decode(as_one, skip_special_tokens=False)
    if answer == "hello there":
        assert tokens == as_one
    if answer == "\n\n":
        assert tokens != as_one, "this is a case where one text would have other tokens"


@pytest.mark.slow
def test_the_first_of_many_texts_that_no_token_expresses_is_told(tmp_path: Path) -> None:
    talk = [asked("1?"), said("1"), asked("2?"), said("2"), asked("3?"), said("3")]
    rows = [{"messages": [asked(f"{'é' * (number > 0)}{number}"), *talk[1:]]} for number in range(CHUNK)]
    with pytest.raises(NodeError, match="row 1 of .*: .*no token for 'é'") as caught:
        draw(chat_node(tmp_path, rows, messages="messages"), tokenizer_of("chatml"))
    assert caught.value.code == "HF403"
