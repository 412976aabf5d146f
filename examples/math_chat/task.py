"""The task of this example: sums in words, a chat tokenizer, and a tiny model with random weights.

    python examples/math_chat/task.py FOLDER

writes `FOLDER/train.jsonl` and `FOLDER/test.jsonl` (rows with `question` and `answer`; no sum stands in
both), and `FOLDER/model`, a Qwen2 of 0.7 million parameters whose tokenizer has a chat template.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

QUESTIONS = (
    "What is {a} plus {b}?",
    "Please add {a} and {b}.",
    "Anna has {a} apples and finds {b} more. How many has she now?",
    "A train has {a} cars, then {b} are added. How many are there?",
)
SYSTEM = "You add numbers. Give the sum between <answer> and </answer>."
TEST_SUMS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = ("system", "user", "assistant")
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<answer>", "</answer>")


def rows(sums: Iterable[tuple[int, int]]) -> list[dict[str, str]]:
    """One question about each sum, in words that the sum chooses."""
    return [
        {"question": QUESTIONS[(a + b) % len(QUESTIONS)].format(a=a, b=b), "answer": str(a + b)}
        for a, b in sums
    ]


def write_data(folder: Path) -> list[str]:
    """Both files; returns all questions."""
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(sums)
    parts = {"test": rows(sums[:TEST_SUMS]), "train": rows(sums[TEST_SUMS:])}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return [row["question"] for part in parts.values() for row in part]


def chat_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, a token for each digit, as Qwen2's; with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\d| ?\p{L}+|[^\p{L}\d]"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*texts, SYSTEM, *ROLES * 3], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 16) * 16, hidden_size=128, intermediate_size=352, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit((__doc__ or "").strip())
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", chat_tokenizer(write_data(folder)))


if __name__ == "__main__":
    main()
