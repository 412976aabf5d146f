"""A tiny model with random weights and a character-level tokenizer: something to start from offline."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Head
from hflow.plan.families.registry import FAMILIES, RUNNING
from hflow.runtime.hf import as_any_new_file
from hflow.runtime.whole_folder import whole_folder

ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"
SPECIAL = ("<pad>", "<eos>", "<unk>")
CHAT_SPECIAL = ("<pad>", "<|im_end|>", "<unk>", "<|im_start|>")
CHAT_TEMPLATES = {
    "chatml": """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
}
# Families, and the key of the number of their experts.
WITH_EXPERTS = {"gpt_oss": "num_local_experts", "mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
EXPERTS, TOP_K = 8, 2
VOCABULARY_MULTIPLE = 16  # so that tensor parallelism of up to 16 divides the embedding


def new_model(
    folder: Path | str,
    family: str = "qwen2",
    layers: int = 3,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int | None = None,
    ffn: int | None = None,
    alphabet: str = ALPHABET,
    max_positions: int = 512,
    tied: bool = False,
    seed: int = 0,
    force: bool = False,
    head: str = "lm",
    chat_template: str | None = None,
    experts: int | None = None,
) -> int:
    """Write a Hugging Face model of random float32 weights; return its number of parameters.

    Weights are drawn as transformers initialises them: normal with deviation 0.02, norms 1, biases 0.

    Args:
        family: one of `RUNNING`.
        kv_heads: key-value heads; as many as `heads` when None.
        ffn: width of the gated MLP, or of each expert; 4 * `hidden` when None.
        alphabet: the characters that get a token each.
        tied: use the embedding as output matrix too.
        force: replace the model files in a folder that is not empty.
        head: ``lm``, or ``scalar`` for a critic, reward or cost model: one number per position.
        chat_template: ``chatml``, with its special tokens; its ``<|im_end|>`` is the end token.
        experts: in each layer, of which a token passes through two; 8 when None.

    Raises:
        HflowError: HF406 when the folder is not empty or cannot be made, the family, head or template is
            unknown, the alphabet is empty, the sizes do not fit, a scalar head should be tied, or a family
            without experts should have some.
    """
    folder = Path(folder)
    kv_heads = heads if kv_heads is None else kv_heads
    _check_kind(folder, family, head, tied)
    _check_sizes(folder, layers, hidden, heads, kv_heads)
    _check_experts(folder, family, experts)
    if not alphabet:
        raise _refused(folder, "the alphabet is empty")
    if chat_template and chat_template not in CHAT_TEMPLATES:
        help_ = f"templates: {', '.join(CHAT_TEMPLATES)}"
        raise _refused(folder, f"unknown chat template `{chat_template}`", help_)
    _check_place(folder, force)
    tokenizer = character_tokenizer(alphabet, CHAT_SPECIAL if chat_template else SPECIAL)
    tokenizer.chat_template = CHAT_TEMPLATES[chat_template] if chat_template else None
    classes: Any = transformers
    kind = FAMILIES[family]
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden if ffn is None else ffn,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **({"num_labels": 1} if head == "scalar" else {}),
        **_expert_keys(family, experts or EXPERTS, 4 * hidden if ffn is None else ffn),
        **_rotary_keys(family, max_positions),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(classes, kind.class_of(cast("Head", head)))(config)
    if head == "lm":
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
        )
    transformers_logging.disable_progress_bar()
    with whole_folder(folder, keeps_others=True) as new:
        model.save_pretrained(new)
        for file in new.glob("*.safetensors"):
            as_any_new_file(file)
        tokenizer.save_pretrained(new)
    return sum(p.numel() for p in model.parameters())


def character_tokenizer(alphabet: str, special: Sequence[str] = SPECIAL) -> PreTrainedTokenizerFast:
    """One token per character, after the `special` ones, of which the first three are the padding, the end
    and the unknown token.

    The vocabulary is filled up with reserved tokens to a multiple of 16.
    """
    names = [*special, *dict.fromkeys(alphabet)]
    names += [f"<reserved-{i}>" for i in range(-len(names) % VOCABULARY_MULTIPLE)]
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=special[2]))
    backend.decoder = decoders.Fuse()
    pad, eos, unknown, *more = special
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in more])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        eos_token=eos,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )


def _check_kind(folder: Path, family: str, head: str, tied: bool) -> None:
    if family not in RUNNING:
        raise _refused(folder, f"unknown family `{family}`", f"families: {', '.join(RUNNING)}")
    if head not in get_args(Head):
        raise _refused(folder, f"unknown head `{head}`", f"heads: {', '.join(get_args(Head))}")
    if tied and head == "scalar":
        raise _refused(folder, "a scalar head cannot be tied to the embedding")


def _check_sizes(folder: Path, layers: int, hidden: int, heads: int, kv_heads: int) -> None:
    if min(layers, hidden, heads, kv_heads) < 1:
        raise _refused(folder, "layers, hidden, heads and kv_heads are at least 1")
    if hidden % (2 * heads):
        raise _refused(folder, f"hidden {hidden} is not an even multiple of {heads} heads")
    if heads % kv_heads:
        raise _refused(folder, f"{heads} heads cannot share {kv_heads} key-value heads evenly")


def _check_experts(folder: Path, family: str, experts: int | None) -> None:
    if experts is not None and family not in WITH_EXPERTS:
        problem = f"models of family `{family}` have no experts"
        raise _refused(folder, problem, f"families with experts: {', '.join(WITH_EXPERTS)}")
    if experts is not None and experts < TOP_K:
        raise _refused(folder, f"there are {experts} experts for a token that passes through {TOP_K}")


def _expert_keys(family: str, experts: int, ffn: int) -> dict[str, Any]:
    """Of config.json; none of a family without experts."""
    if family not in WITH_EXPERTS:
        return {}
    keys = {WITH_EXPERTS[family]: experts, "num_experts_per_tok": TOP_K}
    return keys | {"moe_intermediate_size": ffn, "norm_topk_prob": True} if family == "qwen3_moe" else keys


def _rotary_keys(family: str, max_positions: int) -> dict[str, Any]:
    """gpt-oss stretches its positions: here by four, as if pretraining had had a quarter of them."""
    if family != "gpt_oss":
        return {}
    original = max(1, max_positions // 4)
    yarn = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
    return {"rope_parameters": {**yarn, "original_max_position_embeddings": original}}


def _check_place(folder: Path, force: bool) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        empty = not folder.exists() or not any(folder.iterdir())
    except OSError as error:  # a file has this name or a parent's
        raise _refused(folder, f"the folder cannot be made: {error.strerror}") from error
    if not (empty or force):
        raise _refused(folder, "the folder is not empty", "name another, or pass --force to overwrite")


def _refused(folder: Path, problem: str, help_: str = "") -> HflowError:
    return HflowError(Diagnostic("HF406", f"no new model in `{folder}`: {problem}", help=help_))
