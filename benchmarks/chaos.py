"""Processes of runs are killed at random moments: does every run end as if nothing had happened?

    python benchmarks/chaos.py [--kills 100] [--others 4] [--parallel 1] [--engine megatron|sglang] [--save]

GRPO (algorithms/grpo.yaml, a Qwen2 of 2 layers of 64) on two CPU workers and a Ray of its own, with a
checkpoint after every second step. SIGKILL hits a worker, Ray's raylet or its GCS, a SGLang server, or the
controller: while workers start and load, in a step (transfers included), while a checkpoint is written,
while the model is exported; in `--parallel` runs side by side. A run goes on by itself (`restarts`) from all
but the controller's death; after that one `hflow exec --resume` is allowed. Then, `--others` times each, in
one run after the other: a worker is stopped (SIGSTOP), the disk of the run folder (a tmpfs) is full for a
while, /dev/shm is full for a while; after these the run may be resumed once, too. They need `unshare --mount`
and are left out where that is refused. Each run's metrics (without times) and exported weights must be equal,
to the last bit, to those of a run that nobody disturbed. What is left behind (processes, temporary folders)
is looked for.

In the table, per moment and victim: how many kills, how the run went on (`itself`, `resume`; `unneeded`: it
did not need the process any more, as at its end), and `back_s`, the median of seconds until the next step is
recorded, or the run has ended. `equal`, `unequal`, `lost`: how runs ended, `lost` those that failed or hung.
Exits with 1 if there is an `unequal` or a `lost`, or something is left. The last line is one JSON object;
with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from step import machine

from hflow.runtime.tools.new_model import new_model

ROOT = Path(__file__).resolve().parent
GRAPH = ROOT.parent / "algorithms/grpo.yaml"
STEPS = 12
SETTINGS = (
    f"params.steps={STEPS}", "params.batch=8", "params.group=4", "nodes.actor_train.repeat.minibatch=16",
    "run.checkpoint.every=2", "run.restarts=1000", "run.hang={least: 15, first: 200}",
)  # fmt: skip
KILLED = ("worker", "raylet", "gcs", "server", "controller")
STOPPED, DISK, SHARED_MEMORY = "stopped worker", "disk", "/dev/shm"
OTHERS = (STOPPED, DISK, SHARED_MEMORY)
MOUNT_BYTES = 2**31
PRIVATE_MOUNTS = "HFLOW_CHAOS_MOUNTS"  # set in a process that has them
MOMENTS = ("start", "step", "checkpoint", "export")
LOADED = '"event": "loaded"'
LIMIT_S = 300.0  # for a run to go on, or to end


@dataclass
class Tally:
    kills: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    runs: Counter[str] = field(default_factory=Counter[str])
    left: list[str] = field(default_factory=list[str])


class Running:
    """One `hflow exec`, resumed after its controller was killed. `own`: where its temporary files are."""

    def __init__(self, model: Path, folder: Path, engine: str, own: Path):
        self.folder, self.own = folder, own
        sets = [f"params.model={model}", *SETTINGS]
        self.command = [sys.executable, "-m", "hflow.cli.app", "exec"]
        self.begin = [str(GRAPH), *(t for s in sets for t in ("--set", s)), "--engine", f"rollout={engine}"]
        self.log = folder.with_suffix(".log").open("w")
        self.process = self._start([*self.begin, "--run-dir", str(folder)])

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        own = os.environ | {"TMPDIR": str(self.own)}
        return subprocess.Popen([*self.command, *arguments], stdout=self.log, stderr=self.log, env=own)

    def resume(self) -> None:
        if (self.folder / "plan.json").is_file():
            self.process = self._start(["--resume", str(self.folder)])
        else:  # killed before there was a run
            shutil.rmtree(self.folder, ignore_errors=True)
            self.process = self._start([*self.begin, "--run-dir", str(self.folder)])

    def family(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [p for p in psutil.Process(self.process.pid).children(recursive=True) if is_running(p)]
        return []

    def find(self, kind: str) -> list[psutil.Process]:
        if kind == "controller":
            return [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        return [process for process in self.family() if kind_of(process) == kind]

    def events(self) -> str:
        with suppress(FileNotFoundError):
            return (self.folder / "events.jsonl").read_text()
        return ""

    def loads(self) -> int:
        """How often it began or began again."""
        return self.events().count(LOADED)

    def has_gone_on(self, loads: int, lines: int) -> bool:
        """Whether a step was recorded: after having begun again, or else after those lines of events."""
        text = self.events()
        since = "".join(text.splitlines()[lines:])
        if text.count(LOADED) > loads:
            since = text.rpartition(LOADED)[2]
        return '"event": "ran"' in since or '"event": "exported"' in since


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def kind_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        name, line = process.name(), " ".join(process.cmdline())
        if "RayWorker" in line:
            return "worker"
        if "sglang" in line:
            return "server"
        return {"raylet": "raylet", "gcs_server": "gcs"}.get(name, "")
    return ""


def moment_has_come(run: Running, moment: str) -> bool:
    text = run.events()
    begins = max(text.rfind('"event": "restarting"'), text.rfind('"event": "resumed"'))
    match moment:
        case "start":
            return text.rfind(LOADED) <= begins
        case "step":
            return text.rfind(LOADED) > begins
        case "checkpoint":
            return any((run.folder / "checkpoints").glob(".step-*"))
        case _:
            return any((run.folder / "export").glob(".*"))


def wait_until(condition: Callable[[], bool], limit_s: float, every_s: float = 0.002) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def disturb(run: Running, chance: random.Random, kind: str, tally: Tally) -> bool:
    """Once; returns when the run has gone on, or ended. False: it had ended before, or has no such victim."""
    moment = chance.choice(MOMENTS)
    ended = lambda: run.process.poll() is not None  # noqa: E731
    wait_until(lambda: ended() or moment_has_come(run, moment), 30 if moment != "export" else 120)
    time.sleep(chance.uniform(0, {"start": 8, "step": 3}.get(moment, 0.05)))
    if ended() or not strike(run, kind, chance):
        return False
    loads, lines = run.loads(), len(run.events().splitlines())
    began, by_resume = time.monotonic(), False

    def is_back() -> bool:
        nonlocal by_resume
        if ended():
            if run.process.returncode == 0 or by_resume:
                return True
            by_resume = True
            run.resume()
        return run.has_gone_on(loads, lines)

    survived = wait_until(is_back, LIMIT_S, 0.05)
    again = run.loads() > loads
    tally.kills.append(
        {
            "moment": moment, "victim": kind, "survived": survived,
            "how": "resume" if by_resume else "itself" if again else "unneeded",
            "back_s": time.monotonic() - began,
        }
    )  # fmt: skip
    print(
        *(f"{value:.1f}" if isinstance(value, float) else value for value in tally.kills[-1].values()),
        flush=True,
    )
    return True


def strike(run: Running, kind: str, chance: random.Random) -> bool:
    """Whether there was something to strike."""
    if kind in (DISK, SHARED_MEMORY):
        fill(run.folder.parent if kind == DISK else Path(SHARED_MEMORY), chance.uniform(2, 15))
        return True
    victims = run.find("worker" if kind == STOPPED else kind)
    if not victims:
        return False
    with suppress(psutil.NoSuchProcess):
        chance.choice(victims).send_signal(signal.SIGSTOP if kind == STOPPED else signal.SIGKILL)
    return True


def fill(folder: Path, seconds: float) -> None:
    """Leave the folder's file system not one byte for so long."""
    filler, deadline = folder / "filler", time.monotonic() + seconds
    with filler.open("wb", buffering=0) as file:
        while time.monotonic() < deadline:
            with suppress(OSError):
                while file.write(b"x" * 2**16):
                    pass
            time.sleep(0.01)
    filler.unlink()


def result_of(folder: Path) -> tuple[Any, ...]:
    """Metrics without times, and digests of what was exported."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time_s", "tokens_per_s")
    kept = [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]
    files = sorted((folder / "export").rglob("*.safetensors"))
    return kept, [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def leftovers(folder: Path) -> Iterator[str]:
    """Processes of runs that are nobody's, and their temporary folders."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder) and is_running(process):
                yield f"process {' '.join(process.cmdline())[:80]}"
    yield from (path.name for path in folder.iterdir())


def runs_until_none_is_left(kinds: list[str], begin: Callable[[], Running], whole: Any, tally: Tally) -> None:
    """`kinds`: the disturbances that are left."""
    while kinds:
        run = begin()
        one_run(run, random.Random(run.folder.name), kinds, whole, tally)


def one_run(run: Running, chance: random.Random, kinds: list[str], whole: Any, tally: Tally) -> None:
    """Takes up to four of the disturbances that are left off `kinds`."""
    for _ in range(4):
        if run.process.poll() is not None or not kinds:
            break
        kind = kinds.pop()
        if not disturb(run, chance, kind, tally):
            kinds.append(kind)
    try:
        code = run.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        run.process.kill()
        tally.runs["lost"] += 1
        return
    if code:
        tally.runs["lost"] += 1
        print(f"exit {code}", *run.folder.with_suffix(".log").read_text().splitlines()[-15:], sep="\n")
        return
    tally.runs["equal" if result_of(run.folder) == whole else "unequal"] += 1


def has_private_mounts() -> bool:
    """Whether this program's mounts are its own; begins it anew with such where it can."""
    if os.environ.get(PRIVATE_MOUNTS):
        return True
    unshare = ["unshare", "--mount", "--propagation", "private"]
    if shutil.which("unshare") and not subprocess.run([*unshare, "true"], capture_output=True).returncode:
        os.environ[PRIVATE_MOUNTS] = "1"
        os.execvp("unshare", [*unshare, sys.executable, *sys.argv])
    print("no mounts of its own: neither disks nor /dev/shm will be full", flush=True)
    return False


def mount(folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MOUNT_BYTES}", "tmpfs", folder], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills processes of runs at random moments.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--others", type=int, default=4, help="how often each of what is no kill (default 4)")
    parser.add_argument("--parallel", type=int, default=1, help="so many runs at once (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("megatron", "sglang"), default="megatron")
    parser.add_argument("--save", action="store_true", help="also write results/chaos-DATE.json")
    options = parser.parse_args()
    is_private = has_private_mounts()
    chance, tally = random.Random(options.seed), Tally()
    kinds = [kind for kind in KILLED if kind != "server" or options.engine == "sglang"]
    killed = chance.choices(kinds, k=options.kills)
    others = [*OTHERS] * options.others if is_private else []
    with tempfile.TemporaryDirectory() as folder:
        model, own, runs = (Path(folder) / name for name in ("model", "t", "runs"))
        own.mkdir()
        runs.mkdir()
        if is_private:
            mount(runs)
            mount(Path(SHARED_MEMORY))
        new_model(
            model, family="qwen2", layers=2, hidden=64, heads=4, kv_heads=4, ffn=128,
            alphabet="0123456789+=", max_positions=128, tied=True, seed=0, force=False,
        )  # fmt: skip
        plain = Running(model, runs / "plain", options.engine, own)
        if plain.process.wait():
            sys.exit(plain.folder.with_suffix(".log").read_text())
        whole = result_of(plain.folder)
        numbers = count(1)

        def begin() -> Running:
            return Running(model, runs / f"{options.seed}-{next(numbers)}", options.engine, own)

        for left, parallel in ((killed, options.parallel), (others, 1)):
            chance.shuffle(left)
            with ThreadPoolExecutor(parallel) as threads:
                jobs = [
                    threads.submit(runs_until_none_is_left, left, begin, whole, tally)
                    for _ in range(parallel)
                ]
            for job in jobs:
                job.result()
        time.sleep(10)  # what was begun ends by itself
        tally.left += leftovers(own)
        if is_private:
            subprocess.run(["umount", "--lazy", runs], check=True)  # logs are open
    report = {
        "benchmark": "chaos", "engine": options.engine, "seed": options.seed, "kills": options.kills,
        "others": len(tally.kills) - options.kills, "runs": sum(tally.runs.values()),
        **tally.runs, "left": tally.left, "table": table(tally.kills), **machine(),
    }  # fmt: skip
    line = json.dumps(report)
    if options.save:
        (ROOT / f"results/chaos-{options.engine}-{report['date']}.json").write_text(line + "\n")
    print(line)
    sys.exit(bool(tally.runs["lost"] or tally.runs["unequal"] or tally.left))


def table(kills: list[dict[str, Any]]) -> dict[str, Any]:
    """By moment and victim: how often, how it went on, and how soon."""
    cells: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for kill in kills:
        cells[f"{kill['moment']} {kill['victim']}"].append(kill)
    return {
        name: {
            "kills": len(found), **Counter(kill["how"] for kill in found),
            "not_survived": sum(not kill["survived"] for kill in found),
            "back_s": round(median(kill["back_s"] for kill in found), 1),
        }
        for name, found in sorted(cells.items())
    }  # fmt: skip


if __name__ == "__main__":
    main()
