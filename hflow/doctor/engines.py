"""Which engines work: each does on a tiny model what runs ask of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hflow.plan.engine_registry import ENGINES, MODELLESS_ENGINE
from hflow.runtime.engines.sglang.options import ServerOptions
from hflow.runtime.engines.sglang.server import Server, ServerError
from hflow.runtime.tools.new_model import new_model

NAMES = (MODELLESS_ENGINE, *ENGINES)
PROBE_S = 300.0
MAX_POSITIONS = 64
TOKENS = 8

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """`seconds` that it took; `message`: why it fails."""

    engine: str
    state: Literal["works", "fails", "not installed", "not tried"]
    seconds: float = 0.0
    message: str = ""


class ProbeError(Exception):
    """An engine did not do what it was asked to; the message says why."""


def try_engines(devices: int, start: bool, tell: Tell) -> tuple[Trial, ...]:
    """Start one after the other, unless `start` is false. `tell` hears what is going on."""
    if not start:
        return tuple(Trial(name, "not tried" if _is_installed(name) else "not installed") for name in NAMES)
    with tempfile.TemporaryDirectory(prefix="hflow-doctor-") as folder:
        model = Path(folder) / "model"
        new_model(model, layers=2, hidden=32, heads=2, max_positions=MAX_POSITIONS)
        return tuple(_try(name, model, devices, tell) for name in NAMES)


def _is_installed(engine: str) -> bool:
    return engine != "sglang" or find_spec("sglang") is not None


def _try(engine: str, model: Path, devices: int, tell: Tell) -> Trial:
    if not _is_installed(engine):
        return Trial(engine, "not installed")
    tell(f"starting {engine}")
    begin = time.monotonic()
    try:
        if engine == "sglang":
            _serve(model, devices, tell)
        else:
            _probe(engine, model)
    except (ProbeError, ServerError, OSError) as error:
        return Trial(engine, "fails", time.monotonic() - begin, str(error))
    return Trial(engine, "works", time.monotonic() - begin)


def _probe(engine: str, model: Path) -> None:
    """In a process of its own, which may crash."""
    command = [sys.executable, "-m", "hflow.doctor.probe", engine, str(model)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {PROBE_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ProbeError("\n".join((lines[-1], *lines[-10:-1])))


def _serve(model: Path, devices: int, tell: Tell) -> None:
    on = (os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],) if devices else ()
    options = ServerOptions(
        str(model), "float32", 1, on, (), max_running=4, max_tokens=4 * MAX_POSITIONS,
        max_length=MAX_POSITIONS, seed=0, sleeps=False,
    )  # fmt: skip
    server = Server.start(options, tell)
    try:
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": 0}
        body = {"input_ids": [[5, 6, 7]], "sampling_params": sampling}
        answer = server.post("/generate", body, PROBE_S)[0]["output_ids"]
    finally:
        server.close()
    if len(answer) != TOKENS:
        raise ProbeError(f"it made {len(answer)} tokens of {TOKENS}")
