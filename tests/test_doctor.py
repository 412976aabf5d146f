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

from hflow.doctor.cuda import Cuda, SeenByDriver, this_cuda
from hflow.doctor.engines import Trial
from hflow.doctor.machine import Device, Machine, this_machine
from hflow.doctor.report import DoctorReport, report_json, report_text
from tests.installed import HAS_SGLANG

GPU = Device("NVIDIA H200", 141_000_000_000, "9.0")
VERSIONS = {"hflow": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "sglang": None}
NO_CUDA = Cuda((), None, None, None, "/usr/bin/gcc", True, (0, 0))
SEEN = SeenByDriver("NVIDIA H200", "580.65.06", 345, 1980)
CUDA = Cuda((SEEN, SEEN), "13.0", "2.27.7", None, "/usr/bin/gcc", True, (2, 2))
MACHINE = Machine(
    VERSIONS, (), 2, 24_000_000_000, 20_000_000_000, 12_000_000_000, 20_000, True, "", NO_CUDA
)  # fmt: skip
ON_GPUS = replace(MACHINE, devices=(GPU, GPU), cuda=CUDA)
WORKS, ABSENT = Trial("megatron", "works", 5.94), Trial("sglang", "not installed")


def test_what_it_finds_is_what_there_is() -> None:
    machine = this_machine()
    assert machine.versions["torch"] == torch.__version__
    assert machine.versions["transformers"] == transformers.__version__
    assert (machine.versions["sglang"] is None) == (not HAS_SGLANG)
    assert machine.cores == len(os.sched_getaffinity(0)) and machine.loopback
    assert machine.memory_bytes == psutil.virtual_memory().total > machine.free_bytes > 0
    assert len(machine.devices) == torch.cuda.device_count()
    statistics = os.statvfs("/dev/shm")
    assert machine.shared_bytes == statistics.f_blocks * statistics.f_frsize
    assert machine.open_files == int(
        Path("/proc/self/limits").read_text().split("Max open files")[1].split()[1]
    )


def test_a_report_is_a_table() -> None:
    assert report_text(DoctorReport(MACHINE, (WORKS, ABSENT)), 100) == (
        "hflow         0.1.0\n"
        "python        3.11.7\n"
        "torch         2.13.0\n"
        "sglang        —\n"
        "device        no CUDA device\n"
        "cores         2\n"
        "memory        24.0 GB, 20.0 GB free\n"
        "/dev/shm      12.0 GB\n"
        "open files    20,000\n"
        "CPU kernels   compiled\n"
        "loopback      ports can be opened\n"
        "\n"
        "engine    state           took\n"
        "megatron  works          5.9 s\n"
        "sglang    not installed      -\n"
        "\n"
        "help          SGLang is not installed: make setup-sglang"
    )


def test_suggestions_suit_the_machine() -> None:
    assert DoctorReport(ON_GPUS, (ABSENT,)).suggestions == ("SGLang is not installed: make setup-sglang",)
    assert DoctorReport(MACHINE, (WORKS,)).suggestions == ()
    (help_,) = DoctorReport(replace(MACHINE, loopback=False), (WORKS,)).suggestions
    assert "127.0.0.1" in help_


def test_a_report_tells_what_cuda_needs() -> None:
    assert report_text(DoctorReport(ON_GPUS, (WORKS,)), 100).splitlines()[4:13] == [
        "device        NVIDIA H200, 141.0 GB, compute capability 9.0",
        "device        NVIDIA H200, 141.0 GB, compute capability 9.0",
        "clock         NVIDIA H200: 345 of 1,980 MHz",
        "clock         NVIDIA H200: 345 of 1,980 MHz",
        "driver        580.65.06",
        "torch's CUDA  13.0",
        "NCCL          2.27.7",
        "nvcc          —",
        "compiler      /usr/bin/gcc, Python's headers",
    ]
    assert "peer access   2 of 2 pairs of devices" in report_text(DoctorReport(ON_GPUS, (WORKS,)), 100)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (replace(MACHINE, shared_bytes=64_000_000), "--shm-size=8g"),
        (replace(MACHINE, open_files=1024), "--ulimit nofile=65536"),
        (replace(MACHINE, cuda=replace(NO_CUDA, seen=(SEEN,))), "make setup CUDA=yes"),
        (replace(MACHINE, cuda=replace(CUDA, seen=())), "no driver answers"),
        (replace(MACHINE, cuda=CUDA), "driver 580.65.06 may be too old for CUDA 13.0"),
        (replace(ON_GPUS, cuda=replace(CUDA, compiler=None)), "install gcc"),
        (replace(ON_GPUS, cuda=replace(CUDA, headers=False)), "install python3-dev"),
    ],
)
def test_what_is_missing_is_told_with_what_helps(machine: Machine, words: str) -> None:
    (help_,) = DoctorReport(machine, (WORKS,)).suggestions
    assert words in help_


@pytest.mark.parametrize("machine", [MACHINE, replace(MACHINE, open_files=-1, shared_bytes=None), ON_GPUS])
def test_what_suits_is_not_mended(machine: Machine) -> None:
    assert DoctorReport(machine, (WORKS,)).suggestions == ()


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_the_driver_is_asked_for_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `nvidia-smi --query-gpu` answers for a card and for one without clocks."""
    program(
        tmp_path,
        "nvidia-smi",
        "[ $1 = --query-gpu=name,driver_version,clocks.sm,clocks.max.sm ] || exit 2\n"
        "echo 'NVIDIA H200, 580.65.06, 345, 1980'; echo 'GRID V100, 580.65.06, [N/A], [N/A]'",
    )
    program(tmp_path, "nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "own-cc", "exit 0")
    monkeypatch.setenv("CC", "own-cc")
    found = this_cuda()
    assert found.seen == (SEEN, SeenByDriver("GRID V100", "580.65.06", None, None))
    assert (found.nvcc, found.compiler) == ("12.8", str(tmp_path / "own-cc"))
    assert found.version == torch.version.cuda


def test_a_compiler_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert this_cuda().compiler is None


def test_a_driver_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the devices of any driver, and fails when it is asked about one."""

    def fails(index: int) -> None:
        raise RuntimeError("the NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    assert this_machine().devices == ()


@pytest.mark.parametrize("text", ["echo 'NVIDIA-SMI has failed'; exit 9", "echo Unable to determine"])
def test_a_driver_that_does_not_work_tells_of_no_gpu(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "nvidia-smi", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert this_cuda().seen == ()


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


@pytest.mark.slow
def test_nothing_is_started_without_need() -> None:
    code, report = doctor("--no-start")
    assert code == 0 and report["machine"]["versions"]["torch"] == torch.__version__
    states = {trial["engine"]: trial["state"] for trial in report["trials"]}
    assert states.pop("sglang") == ("not tried" if HAS_SGLANG else "not installed")
    assert states == {"python": "not tried", "megatron": "not tried", "transformers": "not tried"}


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_every_installed_engine_works() -> None:
    code, report = doctor()
    assert code == 0 and report["is_well"], report["trials"]
    tried = {trial["engine"]: trial["seconds"] for trial in report["trials"] if trial["state"] == "works"}
    served = {"sglang"} if HAS_SGLANG else set()
    assert tried.keys() == {"python", "megatron", "transformers"} | served
    assert all(seconds > 0.1 for seconds in tried.values())


@pytest.mark.rotating(6)
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


def test_it_says_why_there_are_no_kernels_for_the_cpu() -> None:
    report = DoctorReport(replace(MACHINE, cpu_kernels="no compiler: install g++"), (WORKS,))
    assert "CPU kernels   no compiler: install g++\n" in report_text(report, 100)
    assert report.suggestions == (
        "training on CPUs is slower without hflow's kernels: no compiler: install g++",
    )
    assert report.is_well
