"""docs/recipes/slurm.sh on two hosts that are apart. The commands of SLURM that it calls are replaced by ones
of this file, which do the same with these hosts: `srun` starts something on some of them and waits for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import hflow
from tests.runtime.hosts import Host, hosts_apart, why_not
from tests.runtime.matrix import GRAPHS
from tests.runtime.ray_hosts import cluster_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.acceptance,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "none"),
]

RECIPE = Path(__file__).parents[2] / "docs/recipes/slurm.sh"
STEPS, RUN_S, JOB = 60, 200, 4711

# Both write what they were asked for, and `srun` its environment, which steps get. The answer to `srun` comes
# through a pipe, when the command has ended.
SRUN = """#!/bin/bash
request=$(mktemp -u "$REQUESTS/XXXXXX")
mkfifo "$request.end"
env -0 > "$request.environment"
printf '%s\\0' "$@" > "$request.new"
mv "$request.new" "$request.request"
read -r status < "$request.end"
exit "$status"
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then tr , '\\n' <<< "$3"; else echo "$@" >> "$REQUESTS/scontrol"; fi
"""


class Slurm:
    """Runs a batch script on the first of the hosts, again with the same number after a requeue."""

    def __init__(self, hosts: Sequence[Host], folder: Path):
        self.hosts, self.folder, self._requests = hosts, folder, folder / "requests"
        self._requests.mkdir()
        commands = folder / "commands"
        commands.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        (folder / "tests").symlink_to(RECIPE.parents[2] / "tests")  # of data, a graph has a relative path
        activate = folder / ".venv/bin/activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
        self._settings = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "GLOO_", "OMP_"))}
        self._settings |= {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "REQUESTS": str(self._requests),
            "SLURM_JOB_ID": str(JOB),
            "SLURM_JOB_NAME": "grpo",
            "SLURM_JOB_NODELIST": ",".join(host.name for host in hosts),
            "SLURM_NNODES": str(len(hosts)),
        }
        self._steps: list[subprocess.Popen[str]] = []

    def batch(self, *arguments: str) -> subprocess.Popen[str]:
        command = ("env", "-C", str(self.folder), "bash", str(RECIPE), *arguments)
        log = (self.folder / "slurm.log").open("a")
        return self.hosts[0].start(*command, settings=self._settings, stdout=log, stderr=log)

    def end_steps(self) -> None:
        """As SLURM does when the batch script has ended."""
        for step in self._steps:
            for process in psutil.Process(step.pid).children() if step.poll() is None else ():
                process.terminate()
            step.wait(60)
        self._steps.clear()

    @property
    def told(self) -> str:
        return (self.folder / "slurm.log").read_text()

    @property
    def requeued(self) -> bool:
        file = self._requests / "scontrol"
        return file.exists() and file.read_text() == f"requeue {JOB}\n"

    def serve(self) -> None:
        """Start what `srun` asks for."""
        for request in self._requests.glob("*.request"):
            *words, _ = request.read_text().split("\0")
            request.unlink()
            threading.Thread(
                target=self._step, args=(words, request.with_suffix(".end")), daemon=True
            ).start()

    def _step(self, words: Sequence[str], end: Path) -> None:
        options = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("--")}
        first = next(at for at, word in enumerate(words) if not word.startswith("--"))
        chosen = [
            host
            for host in self.hosts
            if options.get("--nodelist", host.name) == host.name != options.get("--exclude")
        ]
        assert len(chosen) == int(options["--nodes"]) == int(options["--ntasks"])
        lines = end.with_suffix(".environment").read_text().split("\0")[:-1]
        environment = dict(line.split("=", 1) for line in lines)
        log = (self.folder / "slurm.log").open("a")
        steps = [h.start(*words[first:], settings=environment, stdout=log, stderr=log) for h in chosen]
        self._steps += steps
        codes = [step.wait() for step in steps]
        end.write_text(f"{max(map(abs, codes))}\n")


@contextmanager
def slurm(shared: Path) -> Iterator[Slurm]:
    folder = shared / "slurm"
    folder.mkdir()
    with hosts_apart(2, [shared]) as hosts:
        yield Slurm(hosts, folder)


def wait(slurm: Slurm, job: subprocess.Popen[str], steps: int = STEPS + 1) -> int | None:
    """Until the job has ended, or has made so many steps."""
    metrics, deadline = slurm.folder / f"runs/grpo-{JOB}/metrics.jsonl", time.monotonic() + RUN_S
    while job.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= steps):
        assert time.monotonic() < deadline, slurm.told
        slurm.serve()
        time.sleep(0.1)
    return job.poll()


def test_a_job_that_is_told_to_end_goes_on_after_the_requeue(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> None:
    with slurm(tmp_path_factory.getbasetemp()) as system:
        settings = [f"params.model={tiny_model}", f"params.steps={STEPS}"]
        graph = hflow.load(GRAPHS / "grpo_tiny.yaml", settings)
        plan = system.folder / "plan.json"
        hflow.compile(graph, cluster_file(system.folder, 2), ["actor_train=dp2@0-1"]).save(plan)
        job = system.batch(str(plan))
        assert wait(system, job, steps=3) is None, system.told
        [script] = psutil.Process(job.pid).children()  # `--signal=B:`: nothing else gets the signal
        script.terminate()
        assert wait(system, job) == 143 and system.requeued, system.told
        system.end_steps()
        run = system.folder / f"runs/grpo-{JOB}"
        done = (run / "metrics.jsonl").read_text().count("\n")
        assert 3 <= done < STEPS, system.told
        again = system.batch(str(plan))
        assert wait(system, again) == 0, system.told
        assert f"resuming runs/grpo-{JOB} after {done} steps" in system.told
        found = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert found == list(range(STEPS))
