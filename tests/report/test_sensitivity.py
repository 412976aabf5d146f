"""`hflow compile --sensitivities`: each line is the plan of an edited cluster file, or of other params."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hflow as hf
from hflow.plan.plan import Plan
from tests.on_a_terminal import on_a_terminal

HFLOW = [sys.executable, "-m", "hflow.cli.app"]
CLUSTER = Path("clusters/h100x16.yaml").read_text()
SET = ("params.model=shape:qwen2.5-7b", "models.actor.dtype=bf16", "models.ref.dtype=bf16")
SIZES = ("params.batch=128", "params.max_new_tokens=512")
PIN = "rollout=dp4,tp2"
SETTINGS = [word for override in (*SET, *SIZES) for word in ("--set", override)]
EDITS = {
    "links inside hosts x2": ("bandwidth: 450e9", "bandwidth: 900e9"),
    "links between hosts x2": ("bandwidth: 50e9", "bandwidth: 100e9"),
    "device FLOP/s x2": ("flops: 989e12", "flops: 1978e12"),
    "memory bandwidth x2": ("memory_bandwidth: 3.35e12", "memory_bandwidth: 6.7e12"),
    "device memory x2": ("memory_gb: 80", "memory_gb: 160"),
    "one more host": ("hosts: 2", "hosts: 3"),
    "one host less": ("hosts: 2", "hosts: 1"),
}
OVERRIDES = {
    "responses half as long": ("params.batch=128", "params.max_new_tokens=256"),
    "batch x2, change per sample": ("params.batch=256", "params.max_new_tokens=512"),
}


def hflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HFLOW, *arguments], capture_output=True, text=True, timeout=240)


def varied(*arguments: str) -> subprocess.CompletedProcess[str]:
    return hflow("compile", "grpo", "--sensitivities", *arguments)


@cache
def compiled(cluster: Path, *sizes: str) -> Plan:
    return hf.compile(hf.load("algorithms/grpo.yaml", [*SET, *sizes]), cluster, (PIN,))


def places(plan: Plan) -> dict[str, Any]:
    """Where the nodes with models are, and how, without micro-batches."""
    return {n.node: (n.mesh, n.strategy, n.offload) for n in plan.nodes if n.model}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = varied("--cluster", "h100x16", "--pin", PIN, *SETTINGS, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_are_told_beside_the_plan(found: dict[str, Any]) -> None:
    assert [row["if"] for row in found["sensitivities"]] == [*EDITS, *OVERRIDES]
    assert found["step_time_s"] == compiled(Path("clusters/h100x16.yaml"), *SIZES).step_time_s


@pytest.mark.parametrize("name", [*EDITS, *OVERRIDES])
def test_each_is_the_plan_of_other_files(name: str, found: dict[str, Any], tmp_path: Path) -> None:
    row = next(row for row in found["sensitivities"] if row["if"] == name)
    assert CLUSTER.count(EDITS.get(name, ("hosts: 2",))[0]) == 1
    file = tmp_path / "edited.yaml"
    file.write_text(CLUSTER.replace(*EDITS.get(name, ("", ""))))
    today, plan = compiled(Path("clusters/h100x16.yaml"), *SIZES), compiled(file, *OVERRIDES.get(name, SIZES))
    samples = 2 if "per sample" in name else 1
    assert row["step_time_s"] == plan.step_time_s and row["gap_fraction"] == plan.search.gap
    assert row["change_fraction"] == pytest.approx(plan.step_time_s / samples / today.step_time_s - 1)
    before, after = places(today), places(plan)
    assert row["moved"] == [node for node in after if after[node] != before[node]]
    assert row["code"] is None and row["message"] is None


def test_they_say_different_things(found: dict[str, Any]) -> None:
    """A pinned layout stays; what has more devices or arithmetic is faster, what has fewer slower."""
    rows = {row["if"]: row for row in found["sensitivities"]}
    assert rows["device FLOP/s x2"]["change_fraction"] < -0.2
    assert rows["one host less"]["code"] or rows["one host less"]["change_fraction"] > 0.5
    assert rows["responses half as long"]["change_fraction"] < -0.3
    assert any(row["moved"] for row in rows.values()) and any(row["moved"] == [] for row in rows.values())


@pytest.mark.slow
def test_the_table_has_the_same_figures(found: dict[str, Any]) -> None:
    done = varied("--cluster", "h100x16", "--pin", PIN, *SETTINGS, "--ascii")
    table = done.stdout[done.stdout.index("if there were") :].split("\n\n")[0].splitlines()
    assert done.returncode == 0 and done.stderr == "" and done.stdout.isascii()
    assert re.split(r"\s{2,}", table[0]) == ["if there were", "step", "change", "gap", "nodes that move"]
    assert re.split(r"\s{2,}", table[1])[0] == "what there is"
    for line, row in zip(table[2:], found["sensitivities"], strict=True):
        name, step, change, gap, moved = re.split(r"\s{2,}", line)
        names = ", ".join(row["moved"])
        assert (name, moved) == (row["if"], f"{len(row['moved'])} of 3: {names}" if names else "none")
        assert float(step.split()[0]) == pytest.approx(row["step_time_s"], abs=0.051)
        assert float(change.rstrip("%")) == pytest.approx(100 * row["change_fraction"], abs=0.051)
        assert (gap == "0%") == (row["gap_fraction"] == 0)


@pytest.mark.slow
def test_what_cannot_be_compiled_says_so() -> None:
    """A pin of all devices has too few on one host."""
    pinned = varied("--cluster", "h100x16", "--pin", "actor_train=@0-15", *SETTINGS, "--json")
    codes = {row["if"]: row["code"] for row in json.loads(pinned.stdout)["sensitivities"]}
    assert pinned.returncode == 0 and {name for name, code in codes.items() if code} == {"one host less"}
    assert codes["one host less"] == "HF302"
    shown = varied("--cluster", "h100x16", "--pin", "actor_train=@0-15", *SETTINGS).stdout
    assert re.search(r"^one host less +HF302  +-  +-  -$", shown, re.MULTILINE)
    assert re.search(r"^HF302 +--pin actor_train=@0-15: ", shown, re.MULTILINE)


def test_what_is_not_there_has_no_line() -> None:
    """One host of one device has no links, and in SFT nothing generates."""
    model = ("--set", "params.model=shape:qwen2.5-0.5b", "--set", "params.batch=16")
    done = hflow("compile", "sft", "--cluster", "h100x1", *model, "--sensitivities", "--json")
    names = [row["if"] for row in json.loads(done.stdout)["sensitivities"]]
    left_out = ("links inside hosts x2", "links between hosts x2", "one host less", "responses half as long")
    assert names == [name for name in (*EDITS, *OVERRIDES) if name not in left_out]


@pytest.mark.slow
def test_without_a_proof_the_table_says_so() -> None:
    done = varied("--cluster", "h100x8", *SETTINGS, "--planner", "hybridflow")
    table = done.stdout[done.stdout.index("if there were") :]
    assert done.returncode == 0 and table.count("not proven") >= 8
    assert "note     the plan is not proven best" in table


def test_a_terminal_is_told_of_each_compile() -> None:
    words = ("--set", "params.model=shape:qwen2.5-0.5b", "--set", "params.batch=16", "--sensitivities")
    _, lines = on_a_terminal("compile", "sft", "--cluster", "h100x1", *words)
    told = [line for line in lines if re.match(r"\d/5 ", line)]
    names = ("device FLOP/s x2", "memory bandwidth x2", "device memory x2", "one more host")
    assert told[:4] == [f"{n}/5  {name}" for n, name in enumerate(names, 1)]
    assert told[4:] == ["5/5  batch x2, change per sample"]
