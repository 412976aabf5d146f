"""Checking, showing and compiling start fast: none of them loads what only a run needs. How long that takes,
`benchmarks/start.py` measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_folder import CONFIG

ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
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
from hflow.cli.app import app
try:
    app(sys.argv[2:])
except SystemExit as ended:
    assert not ended.code, ended.code
print(json.dumps(sorted(set(json.loads(sys.argv[1])) & sys.modules.keys())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_check_loads_nothing_heavy(path: Path) -> None:
    said, loaded = run("check", str(path))
    assert said.startswith("ok ") and loaded == []


@pytest.mark.parametrize("command", ["show", "compile"])
def test_nothing_heavy_is_loaded(command: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))  # all that compiling reads of a model
    _, loaded = run(command, "algorithms/grpo.yaml", "--set", f"params.model={tmp_path}")
    assert loaded == []


def run(*arguments: str) -> tuple[str, list[str]]:
    """What a command says, and the heavy modules that it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(HEAVY), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])
