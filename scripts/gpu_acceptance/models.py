"""Models that stages try, made of random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from hflow.graph.ir import Model
from hflow.plan.layout import Mesh
from hflow.plan.read_shape import read_shape
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.new_model import character_tokenizer, new_model
from hflow.runtime.worker.world import World
from scripts.gpu_acceptance.stage import Setting

ALPHABET = "0123456789+=. "
PADDING, END = 0, 1  # the first tokens of `character_tokenizer`


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int


QWEN_1_5B = Size(28, 1536, 12, 2, 8960, 151936, 32768)  # Qwen2.5-1.5B
TINY = Size(2, 64, 4, 2, 128, 512, 2048)


def small_model(folder: Path) -> Path:
    """Four layers, as `hflow new-model` makes them."""
    new_model(folder, layers=4, hidden=128, heads=4, kv_heads=2, ffn=352, alphabet=ALPHABET, force=True)
    return folder


def vivid_model(folder: Path, family: str = "llama") -> Path:
    """As `small_model`, with weights far from those of a new model, so that log-probs and gradients are of
    order 1."""
    new_model(
        folder,
        family=family,
        layers=4,
        hidden=128,
        heads=4,
        kv_heads=2,
        ffn=352,
        alphabet=ALPHABET,
        force=True,
    )
    model = load(folder, torch.float32)
    generator = torch.Generator().manual_seed(1)
    # of Gemma's norms, 1 is added by the model
    one = 0.0 if family.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator) * 0.1 + one * ("norm" in name)
            weight.copy_(drawn.bfloat16())  # the same number in float32 and in bf16
    model.save_pretrained(folder)
    return folder


def large_model(setting: Setting) -> Path:
    """In bf16, of the shape of Qwen2.5-1.5B; on a CPU a small one with the same proportions. Made once."""
    size = QWEN_1_5B if setting.on_gpu else TINY
    folder = setting.folder / "large"
    if (folder / "config.json").exists():
        return folder
    tokenizer = character_tokenizer(ALPHABET)
    config = Qwen2Config(
        vocab_size=size.vocab, num_hidden_layers=size.layers, hidden_size=size.hidden,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, intermediate_size=size.ffn,
        max_position_embeddings=size.positions, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=END, pad_token_id=PADDING, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    with setting.device:
        model = Qwen2ForCausalLM(config).bfloat16()
    model.cpu().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype, device: torch.device | None = None) -> PreTrainedModel:
    """As transformers reads it."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    return model.to(device or torch.device("cpu")).eval()


def alone(setting: Setting) -> World:
    """The world of this process; `close` it in the end."""
    return World.join(HashStore(), 0, 1, setting.device)


def engine(
    world: World,
    folder: Path,
    dtype: Literal["f32", "bf16"],
    train_options: dict[str, object] | None = None,
    strategy: Strategy = PLAIN,
) -> MegatronModel:
    """hflow's."""
    model = Model("actor", str(folder), "lm", False, dtype)
    shape, tokenizer = read_shape(str(folder)), load_tokenizer(str(folder))
    place = Sharding(Mesh.of((0,))), 0, world.group, tokenizer, world.device
    return MegatronModel(model, shape, *place, train_options, strategy)
