"""The task of this example: the larger of two numbers; a chat tokenizer, and a tiny model.

    python examples/math_chat/task.py FOLDER

writes `FOLDER/train.jsonl` and `FOLDER/test.jsonl` (rows with `question` and `answer`; no question stands in
both), `FOLDER/demonstrations.jsonl` (the questions of train.jsonl with a `response`: always right, but every
second one is not in the form that the system message asks for), and `FOLDER/model`, a Qwen2 of 0.7 million
random parameters with a chat template.
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

QUESTION = "Which is larger, {} or {}?"
SYSTEM = "You compare numbers. Answer between <answer> and </answer>."
TEST_ROWS = 256
FORMS = ("<answer>{}</answer>", "It is {}.")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = ("system", "user", "assistant")
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<answer>", "</answer>")


def rows(pairs: Iterable[tuple[int, int]]) -> list[dict[str, str]]:
    return [{"question": QUESTION.format(a, b), "answer": str(max(a, b))} for a, b in pairs]


def demonstrations(rows: Iterable[dict[str, str]], chance: random.Random) -> list[dict[str, str]]:
    """Each in one of both forms."""
    return [{**row, "response": chance.choice(FORMS).format(row["answer"])} for row in rows]


def write_data(folder: Path) -> list[str]:
    """All three files; returns the questions."""
    chance = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a != b]
    chance.shuffle(pairs)
    test, train = rows(pairs[:TEST_ROWS]), rows(pairs[TEST_ROWS:])
    parts = {"test": test, "train": train, "demonstrations": demonstrations(train, chance)}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return [row["question"] for part in (test, train) for row in part]


def chat_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, a token for each digit, as Qwen2's; with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\d| ?\p{L}+|[^\p{L}\d]"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*texts, SYSTEM, *FORMS, *ROLES * 3], trainer)
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
