"""What `hflow doctor` prints: for people, and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from hflow import units
from hflow.doctor.cuda import Cuda
from hflow.doctor.engines import Trial
from hflow.doctor.machine import Machine
from hflow.view.terminal.table import Column, table

COLUMNS: tuple[Column, ...] = (("engine", "left"), ("state", "left"), ("took", "right"))
MISSING = "—"
FEWEST_OPEN_FILES = 4096  # Ray asks for more than the usual 1,024, and raises the limit itself where it may
LEAST_SHARED_BYTES = 10**9  # Docker gives 64 MB


@dataclass(frozen=True)
class DoctorReport:
    machine: Machine
    trials: tuple[Trial, ...]

    @property
    def is_well(self) -> bool:
        """Whether every engine that was tried works, and processes can talk to each other."""
        return self.machine.loopback and all(trial.state != "fails" for trial in self.trials)

    @property
    def suggestions(self) -> tuple[str, ...]:
        return tuple(_suggestions(self.machine, self.trials))


def report_json(report: DoctorReport) -> str:
    values = asdict(report) | {"suggestions": report.suggestions, "is_well": report.is_well}
    return json.dumps(values)


def report_text(report: DoctorReport, width: int) -> str:
    found = "\n".join(f"{name:<14}{value}" for name, value in _facts(report.machine))
    rows = [(trial.engine, trial.state, units.seconds(trial.seconds)) for trial in report.trials]
    parts = [found, table(COLUMNS, rows, width)]
    parts += [f"{trial.engine}: {trial.message}" for trial in report.trials if trial.message]
    parts += ["\n".join(f"help          {line}" for line in report.suggestions)] * bool(report.suggestions)
    return "\n\n".join(parts)


def _facts(machine: Machine) -> Iterator[tuple[str, str]]:
    for name, version in machine.versions.items():
        yield name, version or MISSING
    for device in machine.devices:
        size = units.size(device.memory_bytes)
        yield "device", f"{device.name}, {size}, compute capability {device.capability}"
    if not machine.devices:
        yield "device", "no CUDA device"
    yield from _facts_of_cuda(machine.cuda)
    yield "cores", str(machine.cores)
    yield "memory", f"{units.size(machine.memory_bytes)}, {units.size(machine.free_bytes)} free"
    shared = machine.shared_bytes
    yield "/dev/shm", MISSING if shared is None else units.size(shared)
    yield "open files", f"{machine.open_files:,}" if machine.open_files >= 0 else "not limited"
    yield "CPU kernels", machine.cpu_kernels or "compiled"
    yield "loopback", "ports can be opened" if machine.loopback else "no port can be opened"


def _facts_of_cuda(cuda: Cuda) -> Iterator[tuple[str, str]]:
    """Nothing where neither the machine nor torch has anything of it."""
    if not cuda.seen and not cuda.version:
        return
    for gpu in cuda.seen:
        yield "clock", f"{gpu.name}: {_clock(gpu.clock_mhz)} of {_clock(gpu.max_clock_mhz)} MHz"
    yield "driver", ", ".join(dict.fromkeys(gpu.driver for gpu in cuda.seen)) or MISSING
    yield "torch's CUDA", cuda.version or MISSING
    yield "NCCL", cuda.nccl or MISSING
    yield "nvcc", cuda.nvcc or MISSING
    headers = "Python's headers" if cuda.headers else "no headers of Python"
    yield "compiler", f"{cuda.compiler or MISSING}, {headers}"
    reached, pairs = cuda.peers
    if pairs:
        yield "peer access", f"{reached} of {pairs} pairs of devices"


def _clock(mhz: int | None) -> str:
    return MISSING if mhz is None else f"{mhz:,}"


def _suggestions(machine: Machine, trials: Sequence[Trial]) -> Iterator[str]:
    if any(trial.state == "not installed" for trial in trials):
        yield "SGLang is not installed: make setup-sglang"
    if not machine.loopback:
        yield "workers, Ray and SGLang talk over 127.0.0.1: allow programs to listen there"
    if machine.shared_bytes is not None and machine.shared_bytes < LEAST_SHARED_BYTES:
        yield "Ray and SGLang share memory in /dev/shm, which is small: docker run --shm-size=8g"
    if 0 <= machine.open_files < FEWEST_OPEN_FILES:
        yield "Ray opens thousands of files: nofile in limits.conf, or docker run --ulimit nofile=65536"
    if machine.cpu_kernels and not machine.devices:
        yield f"training on CPUs is slower without hflow's kernels: {machine.cpu_kernels}"
    yield from _suggestions_of_cuda(machine.cuda, bool(machine.devices))


def _suggestions_of_cuda(cuda: Cuda, is_used: bool) -> Iterator[str]:
    """`is_used`: whether torch finds a device."""
    if cuda.seen and not cuda.version:
        yield "there is a GPU, and torch was built without CUDA: make setup CUDA=yes"
    elif cuda.seen and not is_used:
        drivers = f"driver {cuda.seen[0].driver} may be too old for CUDA {cuda.version}"
        yield f"torch finds no GPU: CUDA_VISIBLE_DEVICES may hide them, or {drivers}"
    elif cuda.version and not is_used:
        yield "torch has CUDA, and no driver answers nvidia-smi: install one, or docker run --gpus all"
    if is_used and not cuda.compiler:
        yield "Triton compiles hflow's kernels with a C compiler: install gcc, or name one in CC"
    if is_used and not cuda.headers:
        yield "Triton compiles hflow's kernels against Python.h: install python3-dev"
