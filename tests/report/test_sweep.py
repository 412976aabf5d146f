"""`hflow sweep`: every combination is the plan that `hflow compile` makes; what does not fit says so."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hflow.diagnostics import Diagnostic, HflowError
from hflow.report.sweep import NoPlan, check_planned, no_plan, settings_of, split_values
from tests.on_a_terminal import on_a_terminal

HFLOW = [sys.executable, "-m", "hflow.cli.app"]
BF16 = ("--set", "models.actor.dtype=bf16", "--set", "models.ref.dtype=bf16")
MODEL = ("--set", "params.model=shape:qwen2.5-7b")
CLUSTERS, BATCHES = ("h100x8", "h100x1", "h100x16"), (128, 64)


def hflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HFLOW, *arguments], capture_output=True, text=True, timeout=240)


def sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    return hflow("sweep", "grpo", *arguments)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1", ["1"]),
        ("1,2", ["1", "2"]),
        ("1,,2", ["1", "", "2"]),
        ("[1, 2],[3]", ["[1, 2]", "[3]"]),
        ("{a: [1, 2], b: 3},null", ["{a: [1, 2], b: 3}", "null"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("'[',1", ["'['", "1"]),
        ("['a,b', c],{d: 'e,f'}", ["['a,b', c]", "{d: 'e,f'}"]),
        ("it's,its", ["it's", "its"]),
        ("[1,2", ["[1,2"]),
        ("", [""]),
    ],
)
def test_values_are_between_commas(text: str, parts: list[str]) -> None:
    assert list(split_values(text)) == parts


def test_every_combination_is_there_the_last_key_fastest() -> None:
    found = [[s.override for s in each] for each in settings_of(["a.b=1,2", "c=[1, 2],x", "d=7"])]
    assert found == [[f"a.b={b}", f"c={c}", "d=7"] for b, c in product("12", ("[1, 2]", "x"))]
    assert settings_of([]) == [()]


@pytest.mark.parametrize("texts", [["a"], ["a="], ["=1"], ["a=1,"], ["a=1", "b=2", "a=3"]])
def test_what_is_no_setting_is_refused(texts: Sequence[str]) -> None:
    with pytest.raises(HflowError, match="HF105"):
        settings_of(texts)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The combinations as JSON, and the CSV file of the same sweep."""
    file = tmp_path_factory.mktemp("sweep") / "new" / "figures.csv"
    batches = ",".join(map(str, BATCHES))
    arguments = (*MODEL, *BF16, "--set", f"params.batch={batches}", "--json", "--csv", str(file))
    done = sweep("--clusters", ",".join(CLUSTERS), *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["combinations"], file


@pytest.mark.slow
def test_each_is_the_plan_that_compile_makes(swept: tuple[list[dict[str, Any]], Path]) -> None:
    found, _ = swept
    settings = [{"params.batch": str(batch)} for batch in BATCHES]
    order = [(row["cluster"], row["settings"]["params.batch"]) for row in found]
    assert order == [(cluster, each["params.batch"]) for cluster, each in product(CLUSTERS, settings)]
    for row in found:
        batch = ("--set", f"params.batch={row['settings']['params.batch']}")
        done = hflow("compile", "grpo", "--cluster", row["cluster"], *MODEL, *BF16, *batch, "--json")
        if done.returncode:
            assert row["code"] == re.findall(r"error\[(HF\d+)\]: (.*)", done.stderr)[0][0] == "HF305"
            assert row["message"] == re.findall(r"error\[HF\d+\]: (.*)", done.stderr)[0]
            assert row["step_time_s"] is None and row["devices"] is None
            continue
        plan, devices = json.loads(done.stdout), int(row["cluster"].removeprefix("h100x"))
        used = {device for node in plan["nodes"] for device in node["devices"]}
        peak = max(m["peak_bytes"] / m["capacity_bytes"] for m in plan["memory"])
        assert (row["plan"], row["devices"], row["devices_used"]) == (plan["hash"], devices, len(used))
        assert (row["step_time_s"], row["peak_memory_fraction"]) == (plan["step_time_s"], peak)
        assert (row["bound_s"], row["gap_fraction"]) == (plan["search"]["bound_s"], plan["search"]["gap"])
        assert row["tokens_per_s_per_device"] == pytest.approx(plan["tokens_per_s"] / devices)
        assert row["device_s_per_step"] == pytest.approx(plan["step_time_s"] * devices)
    assert {row["code"] for row in found} == {None, "HF305"}


def test_the_file_has_the_same_figures(swept: tuple[list[dict[str, Any]], Path]) -> None:
    found, file = swept
    rows = list(csv.DictReader(io.StringIO(file.read_text(), newline="")))
    assert len(rows) == len(found)
    for row, expected in zip(rows, found):
        told = {"cluster": expected["cluster"], **expected["settings"]}
        told |= {key: "" if v is None else str(v) for key, v in expected.items() if key != "settings"}
        assert row == {**told, "cluster": expected["cluster"]}
    assert "step_time_s" in rows[0] and "tokens_per_s_per_device" in rows[0]


@pytest.mark.slow
def test_the_table_says_what_does_not_fit() -> None:
    done = sweep("--clusters", "h100x1,h100x8", *MODEL, *BF16, "--set", "params.batch=128,64")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == ""
    assert lines[0].split() == ["grpo", "4", "combinations,", "2", "plans"]
    assert "params.model=shape:qwen2.5-7b" in lines[1] and "params.batch" not in lines[1]
    header = "cluster params.batch step bound gap tokens/s/device peak devices device-s/step"
    assert lines[3].split() == header.split()
    assert [line.split()[:3] for line in lines[4:6]] == [["h100x1", n, "HF305"] for n in ("128", "64")]
    assert [line.split()[:2] for line in lines[6:8]] == [["h100x8", n] for n in ("128", "64")]
    assert all(line.split()[-4:-1] == ["8", "of", "8"] for line in lines[6:8])
    (reason,) = " ".join(line.strip() for line in lines[9:]).split("HF305    ")[1:]
    said = "no plan of `grpo` fits into the memory of `h100x1`: 1 H100-80G with 72.0 GB each"
    assert re.fullmatch(
        f"{said}; with each model in one place, some device needs [0-9.]+ GB while `[a-z_]+` runs", reason
    )
    assert done.stdout.isascii()


@pytest.mark.slow
@pytest.mark.parametrize("command", [("sweep", "--csv"), ("compile", "--html"), ("compile", "-o")])
def test_files_that_cannot_be_written_are_told_before_plans_are_made(
    command: tuple[str, str], tmp_path: Path
) -> None:
    name, option = command
    done = hflow(name, "grpo", *MODEL, *BF16, "--set", "params.minibatch=7", option, str(tmp_path))
    assert done.returncode == 1 and "HF219" in done.stderr  # what is wrong with the graph is told first
    large = ("--set", "params.batch=128", "--planner", "exhaustive")
    done = hflow(
        name,
        "grpo",
        "--cluster" + "s" * (name == "sweep"),
        "h100x16",
        *MODEL,
        *BF16,
        *large,
        option,
        str(tmp_path),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == f"error[HF001]: cannot write `{tmp_path}`: Is a directory"


def test_where_nothing_fits_the_exit_code_is_one() -> None:
    done = sweep("--clusters", "h100x1", *MODEL)
    assert done.returncode == 1 and "HF305" in done.stdout and done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--clusters", "h100x8,h100x9", *MODEL), "error[HF001]: no cluster file `h100x9`"),
        (("--clusters", "h100x1,mixed", *MODEL), "error[HF307]: cluster `mixed` mixes"),
        (("--clusters", "h100x8", *MODEL, "--set", "params.bach=1,2"), "error[HF105]: `params` has no key"),
        (("--clusters", "h100x8", *MODEL, "--set", "params.batch=1,two"), "error[HF"),
        (("--clusters", "h100x8", "--set", "params.model=models/none"), "error[HF303]: "),
        (
            ("--clusters", "h100x1,h100x8", *MODEL, "--pin", "nope=tp2"),
            "error[HF302]: --pin nope=tp2: no node",
        ),
    ],
)
def test_what_is_written_wrongly_is_told_as_ever(arguments: tuple[str, ...], told: str) -> None:
    """Before any plan is made, or where all combinations share it."""
    done = sweep(*arguments)
    assert done.returncode == 1 and done.stdout == "", done.stdout
    assert done.stderr.startswith(told) and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_pin_that_one_cluster_has_no_device_for_is_a_row() -> None:
    done = sweep("--clusters", "h100x8,h100x16", *MODEL, *BF16, "--pin", "actor_train=@0-15", "--json")
    codes = [row["code"] for row in json.loads(done.stdout)["combinations"]]
    assert done.returncode == 0 and codes == ["HF302", None]


def test_nothing_but_what_does_not_fit_becomes_a_row() -> None:
    pin, memory, shape = (Diagnostic(code, "why") for code in ("HF302", "HF305", "HF303"))
    assert no_plan(HflowError(memory), "c", ()) == NoPlan("c", (), memory)
    with pytest.raises(HflowError):
        no_plan(HflowError([memory, shape]), "c", ())
    assert not check_planned([NoPlan("c", (), pin), NoPlan("d", (), memory)])
    with pytest.raises(HflowError) as caught:
        check_planned([NoPlan("c", (), pin), NoPlan("d", (), pin)])
    assert caught.value.diagnostics == (pin,)


@pytest.mark.slow
def test_a_terminal_is_told_of_each_compile() -> None:
    model = "params.model=shape:qwen2.5-0.5b"
    _, lines = on_a_terminal(
        "sweep", "sft", "--clusters", "h100x1", "--set", model, "--set", "params.batch=16,8"
    )
    told = [line for line in lines if re.match(r"\d/2 ", line)]
    assert told == [f"{n}/2  h100x1  {model}  params.batch={batch}" for n, batch in ((1, 16), (2, 8))]


def test_a_sweep_is_light() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from hflow.cli.app import app;"
        "model = 'params.model=shape:qwen2.5-0.5b';"
        "r = CliRunner().invoke(app, ['sweep', 'sft', '--clusters', 'h100x1', '--set', model]);"
        "assert r.exit_code == 0, r.output;"
        "heavy = {'torch', 'ray', 'megatron', 'sglang', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
