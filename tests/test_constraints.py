"""Which torch `make setup` installs: that of SGLang where there is a GPU, else the one of constraints.txt."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest


def pins(*files: str) -> dict[str, str]:
    lines = (line for file in files for line in Path(file).read_text().splitlines())
    named = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name: version for name, _, version in named}


def written_by_make(cuda: str) -> dict[str, str]:
    """What the recipe of `make setup` would hand to pip as constraints."""
    recipe = subprocess.run(
        ["make", "-n", "-B", "setup", f"CUDA={cuda}"], capture_output=True, text=True, check=True
    ).stdout
    command = next(line for line in recipe.splitlines() if "> .venv/constraints.txt" in line)
    told = subprocess.run(command.split(" > ")[0], shell=True, capture_output=True, text=True, check=True)
    return dict(line.split("==") for line in told.stdout.splitlines())


def test_without_a_gpu() -> None:
    assert written_by_make("no") == pins("constraints.txt")


def test_with_a_gpu_torch_alone_is_another() -> None:
    found = written_by_make("yes")
    assert found == pins("constraints.txt", "constraints-cuda.txt")
    assert {name for name, version in pins("constraints.txt").items() if found[name] != version} == {"torch"}


def test_the_torch_for_gpus_is_the_one_that_sglang_requires() -> None:
    try:
        asked = requires("sglang") or []
    except PackageNotFoundError:
        pytest.skip("SGLang is not installed")
    assert f"torch=={pins('constraints-cuda.txt')['torch']}" in asked
