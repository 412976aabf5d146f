"""What `hflow doctor` prints: for people, and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from hflow import units
from hflow.doctor.engines import Trial
from hflow.doctor.machine import Machine
from hflow.view.terminal.table import Column, table

COLUMNS: tuple[Column, ...] = (("engine", "left"), ("state", "left"), ("took", "right"))
MISSING = "—"


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
        yield "device", f"{device.name}, {units.size(device.memory_bytes)}"
    if not machine.devices:
        yield "device", "no CUDA device"
    yield "cores", str(machine.cores)
    yield "memory", f"{units.size(machine.memory_bytes)}, {units.size(machine.free_bytes)} free"
    yield "loopback", "ports can be opened" if machine.loopback else "no port can be opened"


def _suggestions(machine: Machine, trials: Sequence[Trial]) -> Iterator[str]:
    if any(trial.state == "not installed" for trial in trials):
        yield "SGLang is not installed: make setup-sglang"
    if not machine.loopback:
        yield "workers, Ray and SGLang talk over 127.0.0.1: allow programs to listen there"
