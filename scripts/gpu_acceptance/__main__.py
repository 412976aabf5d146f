"""Try hflow on one GPU, stage by stage; one JSON object per line tells how each ended.

    scripts/gpu_acceptance.sh [--device cuda|cpu] [--folder FOLDER] [STAGE ...]

A stage is a process of its own, with a time limit (three times as long on a CPU); after one that fails the
next runs all the same. `state` is `ok`, `failed` (with a `message`; FOLDER/STAGE.log has what it wrote) or
`skipped`: with the device `cpu` every stage runs as far as it goes, small, and says what it leaves to a GPU.
The exit code is 1 if a stage failed. Needs neither Ray, SGLang nor a network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMITS_S = {  # in their order
    "doctor": 90,
    "cpu_plan": 90,
    "numerics": 120,
    "fused": 60,
    "decoding": 60,
    "learning": 120,
    "memory": 120,
    "lengths": 120,
    "calibration": 90,
    "predictions": 90,
    "kernels": 90,
    "handover": 60,
    "out_of_memory": 90,
}
CPU_PATIENCE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_acceptance.sh", description="Try hflow on one GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="for models, runs and logs; by default a temporary one")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(LIMITS_S))
    given = parser.parse_args(arguments)
    unknown = set(given.stages) - LIMITS_S.keys()
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(LIMITS_S)}")
    with tempfile.TemporaryDirectory(prefix="hflow-acceptance-") as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        states = [_tell(_run(stage, given.device, folder)) for stage in given.stages or LIMITS_S]
    return 1 if "failed" in states else 0


def _tell(result: dict[str, Any]) -> str:
    print(json.dumps(result), flush=True)
    return result["state"]


def _run(stage: str, device: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", f"scripts.gpu_acceptance.{stage}", device, str(folder)]
    log, began = folder / f"{stage}.log", time.monotonic()
    limit_s = LIMITS_S[stage] * (CPU_PATIENCE if device == "cpu" else 1)
    with log.open("w") as stderr:
        # a session of its own: whatever the stage has started ends with it
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        )
        try:
            out, _ = process.communicate(timeout=limit_s)
            found = _result(out, process.returncode, log)
        except subprocess.TimeoutExpired:
            found = {"state": "failed", "message": f"no end within {limit_s} s"}
        finally:
            _end(process)
    return {"stage": stage, "device": device, "seconds": round(time.monotonic() - began, 1), **found}


def _result(out: str, code: int, log: Path) -> dict[str, Any]:
    """The last line that the stage printed, if it is what a stage prints."""
    try:
        found = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        found = None
    if isinstance(found, dict) and "state" in found:
        return found
    lines = log.read_text(errors="replace").strip().splitlines()
    return {"state": "failed", "message": lines[-1] if lines else f"exit code {code}"}


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
