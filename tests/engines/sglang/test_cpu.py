"""Running SGLang without CUDA: what each setting is for, and the stand-ins against published ones."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hflow.runtime.engines.sglang import cpu
from tests.engines.models import Folders
from tests.installed import needs_sglang

ROOT = Path(__file__).parents[3]

# what each needs to be shown with: a program that prints this with the setting, and something else without
CASES = {
    "SGLANG_USE_CPU_ENGINE": ("from sglang.srt.utils import is_cpu; print(is_cpu())", "True"),
    "GOMP_SPINCOUNT": ("print(os.environ.get('GOMP_SPINCOUNT'))", "2000"),
    "TORCHDYNAMO_DISABLE": (
        "import torch; from sglang.srt.layers.sampler import multinomial_with_seed as draw\n"
        "print(draw(torch.zeros(1, 9), torch.tensor([1]), torch.tensor([2])).shape)",
        "torch.Size([1, 1])",
    ),
    "attention_backend": (
        "from sglang.srt.server_args import ServerArgs\n"
        "args = ServerArgs(model_path=model, enable_deterministic_inference=True, **given)\n"
        "args.resolve_once(); print('accepted')",
        "accepted",
    ),
}  # fmt: skip


def last_line(program: str, **environment: str) -> str:
    """What a fresh process prints last; the error's name if it fails."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = run.stdout if run.returncode == 0 else run.stderr
    return output.strip().splitlines()[-1]


def test_every_setting_has_a_case() -> None:
    assert [setting.name for setting in (*cpu.ENVIRONMENT, *cpu.ARGUMENTS)] == list(CASES)


@pytest.mark.rotating(6)
@needs_sglang
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_setting_is_needed_and_works(name: str, folders: Folders) -> None:
    program, expected = CASES[name]
    prepare = (
        "from hflow.runtime.engines.sglang import cpu; import os\n"
        f"model = {folders.of('qwen2', False)!r}; cpu.prepare((), 1); given = cpu.arguments()\n"
    )
    without = (
        "from hflow.runtime.engines.sglang import cpu; import os\n"
        f"cpu.ENVIRONMENT = tuple(s for s in cpu.ENVIRONMENT if s.name != {name!r})\n"
        f"cpu.ARGUMENTS = tuple(s for s in cpu.ARGUMENTS if s.name != {name!r})\n"
    )
    assert last_line(prepare + program) == expected
    assert last_line(without + prepare + program) != expected


@needs_sglang
@pytest.mark.slow
@pytest.mark.parametrize(("patched", "expected"), [(True, "2.0"), (False, "RuntimeError: No supported")])
def test_matrix_products_stay_those_of_torch(patched: bool, expected: str) -> None:
    program = "from hflow.runtime.engines.sglang import cpu; cpu.prepare((), 1)\n"
    program += "cpu.keep_torch_kernels()\n" if patched else ""
    program += (
        "import torch; from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode\n"
        "enable_batch_invariant_mode(); print(torch.mm(torch.ones(1, 2), torch.ones(2, 1)).item())"
    )
    assert last_line(program).startswith(expected)


@needs_sglang
@pytest.mark.slow
@pytest.mark.parametrize(("patched", "expected"), [(True, "4 2 1"), (False, "8 4 1")])
def test_ranks_share_heads_of_keys_and_values(patched: bool, expected: str, folders: Folders) -> None:
    """Heads of queries, those of keys and values, and how many of these a rank has: of 4 and 2, on four."""
    program = "from hflow.runtime.engines.sglang import cpu; cpu.prepare((), 4)\n"
    program += "cpu.share_kv_heads()\n" if patched else ""
    program += (
        "from sglang.srt.configs.load_config import LoadConfig\n"
        "from sglang.srt.configs.model_config import ModelConfig\n"
        "from sglang.srt.model_executor import model_runner\n"
        f"model = ModelConfig({folders.of('qwen2', False)!r})\n"
        "found = model_runner.adjust_config_with_unaligned_cpu_tp(model, LoadConfig(), 4)\n"
        "print(found.num_attention_heads, found.num_key_value_heads, found.get_num_kv_heads(4))"
    )
    assert last_line(program) == expected


def test_the_worker_s_side_imports_neither_torch_nor_sglang() -> None:
    program = (
        "import sys, hflow.runtime.engines.sglang.server\n"
        "print(sorted({'torch', 'sglang', 'ray', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    assert last_line(program) == "[]"


def test_ranks_share_the_cores_out() -> None:
    assert cpu.bind([0, 1], 1) == "0,1"
    assert cpu.bind([0, 1], 2) == "0|1"
    assert cpu.bind([2, 3, 5, 7, 8], 2) == "2,3|5,7,8"
    assert cpu.bind([4], 3) == "4|4|4"


@pytest.mark.slow
def test_a_rank_uses_its_cores_only() -> None:
    core = max(os.sched_getaffinity(0))
    program = (
        f"import os; from hflow.runtime.engines.sglang import cpu; cpu.use_cores([{core}]); import torch\n"
        "print(os.sched_getaffinity(0), torch.get_num_threads())"
    )
    assert last_line(program, OMP_NUM_THREADS="7") == f"{{{core}}} 1"


@pytest.fixture(scope="module")
def stand_in() -> str:
    """Its path; importing it here would show it to all other tests."""
    return str(cpu.STAND_IN)


def murmur3(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32 of whole blocks and a tail, as published by Austin Appleby (public domain)."""
    mask = 0xFFFFFFFF
    rotate = lambda x, r: (x << r | x >> (32 - r)) & mask  # noqa: E731
    scramble = lambda k: rotate(k * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask  # noqa: E731
    h, whole = seed, len(data) // 4 * 4
    for (k,) in struct.iter_unpack("<I", data[:whole]):
        h = (rotate(h ^ scramble(k), 13) * 5 + 0xE6546B64) & mask
    h ^= scramble(int.from_bytes(data[whole:], "little"))
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


@pytest.mark.parametrize(
    ("text", "seed", "published"),
    [
        ("", 0, 0x00000000),
        ("test", 0, 0xBA6BD213),
        ("Hello, world!", 0, 0xC0363E43),
        ("Hello, world!", 0x9747B28C, 0x24884CBA),
        ("The quick brown fox jumps over the lazy dog", 0, 0x2E4FF723),
    ],
)
def test_the_reference_hash_is_the_published_one(text: str, seed: int, published: int) -> None:
    """The vectors of Wikipedia's article on MurmurHash."""
    assert murmur3(text.encode(), seed) == published


def test_the_stand_in_hash_is_murmur3(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(stand_in)
    import sgl_kernel  # pyright: ignore[reportMissingImports]

    draw = random.Random(0)
    seeds = [0, 1, 2**63, 2**64 - 1, *(draw.getrandbits(64) for _ in range(4))]
    positions = [0, 1, 2**31 - 1, 77, *(draw.getrandbits(31) for _ in range(4))]
    columns = [0, 1, 151_935, draw.getrandbits(31)]
    seed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds]).view(torch.uint64)
    found = sgl_kernel.murmur_hash32_cpu(seed, torch.tensor(positions), torch.tensor(columns))
    assert found.dtype == torch.uint32
    assert found.tolist() == [
        [murmur3(struct.pack("<QII", s, p, c)) for c in columns] for s, p in zip(seeds, positions)
    ]


@needs_sglang
@pytest.mark.slow
def test_the_stand_in_hash_is_that_of_sglang_s_own_kernel(stand_in: str) -> None:
    """Triton interprets the kernel that runs on GPUs."""
    program = f"""
import sys, torch
sys.path.append({stand_in!r})
import sgl_kernel
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
seed = torch.randint(-(2**63), 2**63 - 1, (5,)).view(torch.uint64)
positions, columns = torch.randint(0, 2**31 - 1, (5,)), torch.arange(1500)
found = torch.empty(5, 1500, dtype=torch.uint32)
murmur_hash32_kernel[(5, 2)](seed, positions, columns, found, 5, 1500, BLOCK_SIZE=1024)
expected = sgl_kernel.murmur_hash32_cpu(seed, positions, columns)
print(found.tolist() == expected.tolist(), len(set(found[0].tolist())))
"""
    assert last_line(program, TRITON_INTERPRET="1") == "True 1500"


def test_slots_are_written_to_the_table(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(stand_in)
    import sgl_kernel  # pyright: ignore[reportMissingImports]

    table = torch.zeros(4, 6, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0, 3]), torch.tensor([1, 4, 0]), torch.tensor([4, 6, 0])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.arange(10, 15), 6)
    assert table.tolist() == [[0, 0, 0, 0, 13, 14], [0] * 6, [0, 10, 11, 12, 0, 0], [0] * 6]
    with pytest.raises(NotImplementedError, match="fill_bonus_tokens_cpu does not exist on CPUs"):
        sgl_kernel.fill_bonus_tokens_cpu()
