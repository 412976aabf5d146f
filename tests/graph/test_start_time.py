"""Checking, showing and compiling start fast: none of them loads what only a run needs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.compiler.conftest import CONFIG

ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
MAX_SECONDS = 1.0  # wall time of `hflow check`, with the start of Python
HEAVY = (
    "torch",
    "ray",
    "megatron",
    "transformers",
    "sglang",
    "tokenizers",
    "datasets",
    "pandas",
    "hflow.runtime",
)

# Runs the command line in this process, then says which heavy modules it has loaded.
PROGRAM = """
import json, sys
from hflow.cli import app
try:
    app(sys.argv[2:])
except SystemExit as ended:
    assert not ended.code, ended.code
print(json.dumps(sorted(set(json.loads(sys.argv[1])) & sys.modules.keys())))
"""


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_check_takes_less_than_a_second(path: Path) -> None:
    command = [sys.executable, "-m", "hflow.cli", "check", str(path)]
    assert any(seconds(command) < MAX_SECONDS for _ in range(3))  # the best of three counts


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("ok "), done.stdout + done.stderr
    return time.perf_counter() - started


@pytest.mark.parametrize("command", ["check", "show", "compile"])
def test_nothing_heavy_is_loaded(command: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))  # all that compiling reads of a model
    arguments = [command, "algorithms/grpo.yaml", "--set", f"params.model={tmp_path}"]
    program = [sys.executable, "-c", PROGRAM, json.dumps(HEAVY), *arguments]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
