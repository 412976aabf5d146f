"""The command `hflow doctor`."""

from __future__ import annotations

import sys

from rich.console import Console

from hflow.doctor.engines import try_engines
from hflow.doctor.machine import this_machine
from hflow.doctor.report import DoctorReport, report_json, report_text


def doctor_command(as_json: bool, start: bool, width: int) -> None:
    """Print the report, `width` columns wide; exit code 1 when something that is installed does not work."""
    machine = this_machine()
    console = Console(stderr=True)
    with console.status("looking at this machine") as status:
        report = DoctorReport(machine, try_engines(len(machine.devices), start, status.update))
    print(report_json(report) if as_json else report_text(report, width))
    if not report.is_well:
        sys.exit(1)
