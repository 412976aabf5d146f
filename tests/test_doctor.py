"""`hflow doctor`: what it finds is what there is, and what does not work it tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from hflow.doctor.engines import Trial
from hflow.doctor.machine import Device, Machine, this_machine
from hflow.doctor.report import DoctorReport, report_json, report_text
from tests.installed import HAS_SGLANG

GPU = Device("NVIDIA H200", 141_000_000_000)
VERSIONS = {"hflow": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "sglang": None}
MACHINE = Machine(VERSIONS, (), 2, 24_000_000_000, 20_000_000_000, True)
WORKS, ABSENT = Trial("megatron", "works", 5.94), Trial("sglang", "not installed")


def test_what_it_finds_is_what_there_is() -> None:
    machine = this_machine()
    assert machine.versions["torch"] == torch.__version__
    assert machine.versions["transformers"] == transformers.__version__
    assert (machine.versions["sglang"] is None) == (not HAS_SGLANG)
    assert machine.cores == len(os.sched_getaffinity(0)) and machine.loopback
    assert machine.memory_bytes == psutil.virtual_memory().total > machine.free_bytes > 0
    assert len(machine.devices) == torch.cuda.device_count()


def test_a_report_is_a_table() -> None:
    assert report_text(DoctorReport(MACHINE, (WORKS, ABSENT)), 100) == (
        "hflow         0.1.0\n"
        "python        3.11.7\n"
        "torch         2.13.0\n"
        "sglang        —\n"
        "device        no CUDA device\n"
        "cores         2\n"
        "memory        24.0 GB, 20.0 GB free\n"
        "loopback      ports can be opened\n"
        "\n"
        "engine    state           took\n"
        "megatron  works          5.9 s\n"
        "sglang    not installed      -\n"
        "\n"
        "help          SGLang is not installed: make setup-sglang"
    )


def test_suggestions_suit_the_machine() -> None:
    on_gpu = DoctorReport(replace(MACHINE, devices=(GPU,)), (ABSENT,))
    assert on_gpu.suggestions == ("SGLang is not installed: make setup-sglang",)
    assert "device        NVIDIA H200, 141.0 GB" in report_text(on_gpu, 100)
    assert DoctorReport(MACHINE, (WORKS,)).suggestions == ()
    (help_,) = DoctorReport(replace(MACHINE, loopback=False), (WORKS,)).suggestions
    assert "127.0.0.1" in help_


def test_only_what_is_installed_can_be_wrong() -> None:
    assert DoctorReport(MACHINE, (WORKS, ABSENT, Trial("python", "not tried"))).is_well
    assert not DoctorReport(replace(MACHINE, loopback=False), (WORKS,)).is_well
    broken = DoctorReport(MACHINE, (WORKS, Trial("sglang", "fails", 8.0, "it died: ImportError: no kernel")))
    assert not broken.is_well and "sglang: it died: ImportError: no kernel" in report_text(broken, 100)
    assert json.loads(report_json(broken))["trials"][1]["message"] == "it died: ImportError: no kernel"


def doctor(*options: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "hflow.cli.app", "doctor", "--json", *options],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | environment,
    )
    return done.returncode, json.loads(done.stdout)


def test_nothing_is_started_without_need() -> None:
    code, report = doctor("--no-start")
    assert code == 0 and report["machine"]["versions"]["torch"] == torch.__version__
    states = {trial["engine"]: trial["state"] for trial in report["trials"]}
    assert states.pop("sglang") == ("not tried" if HAS_SGLANG else "not installed")
    assert states == {"python": "not tried", "megatron": "not tried", "transformers": "not tried"}


@pytest.mark.rotating(3)
@pytest.mark.slow
def test_every_installed_engine_works() -> None:
    code, report = doctor()
    assert code == 0 and report["is_well"], report["trials"]
    tried = {trial["engine"]: trial["seconds"] for trial in report["trials"] if trial["state"] == "works"}
    served = {"sglang"} if HAS_SGLANG else set()
    assert tried.keys() == {"python", "megatron", "transformers"} | served
    assert all(seconds > 0.1 for seconds in tried.values())


@pytest.mark.rotating(3)
@pytest.mark.slow
def test_engines_that_cannot_be_imported_are_told(tmp_path: Path) -> None:
    for package in ("megatron", "sglang"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise ImportError('{package} is broken')\n")
    code, report = doctor(PYTHONPATH=str(tmp_path))
    trials = {trial["engine"]: trial for trial in report["trials"]}
    assert code == 1 and not report["is_well"]
    assert trials["python"]["state"] == trials["transformers"]["state"] == "works"
    for package in ("megatron", "sglang"):
        assert trials[package]["state"] == "fails"
        assert f"ImportError: {package} is broken" in trials[package]["message"].splitlines()[0]
