"""Under a limit on the address space, commands that load torch or Ray say so, and others just work."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

import hflow
from hflow.address_space import RAY_BYTES, TORCH_BYTES, require_address_space
from hflow.diagnostics import HflowError

GRAPH = "algorithms/sft.yaml"


def run_in(size: int, *arguments: str) -> tuple[int, str]:
    """Exit code and messages of a command that may map so many bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "hflow.cli.app", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)),
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("size", "command"),
    [
        (RAY_BYTES - 1, ("exec", GRAPH)),
        (TORCH_BYTES - 1, ("exec", GRAPH, "--workers", "inline")),
        (3 * 10**8, ("exec", GRAPH)),
        (TORCH_BYTES - 1, ("new-model", "somewhere")),
        (TORCH_BYTES - 1, ("calibrate",)),
        (TORCH_BYTES - 1, ("doctor",)),
    ],
)
def test_what_loads_torch_is_refused(size: int, command: tuple[str, ...]) -> None:
    code, output = run_in(size, *command)
    assert code == 1
    assert output.startswith("error[HF404]: ") and "of address space" in output and "ulimit -v" in output


@pytest.mark.slow
def test_check_and_compile_need_little() -> None:
    assert run_in(3 * 10**8, "check", GRAPH)[0] == 0
    model = "params.model=shape:qwen2.5-0.5b"
    assert run_in(3 * 10**8, "compile", GRAPH, "--set", model, "--cluster", "h200x8")[0] == 0


def test_in_python_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is made up: this process may have mapped more than the real one would leave."""
    plan = hflow.compile(hflow.load(GRAPH, "params.model=shape:qwen2.5-0.5b"), "h200x8")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**9, resource.RLIM_INFINITY))
    with pytest.raises(HflowError, match="HF404.*a run on Ray needs"):
        hflow.execute(plan)


def test_without_a_limit_nothing_is_said() -> None:
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        require_address_space(2**62, "anything")
