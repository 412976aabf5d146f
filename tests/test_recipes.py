"""The recipes in docs/recipes: their shell is right, and their commands exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hflow.cli.app import app

RECIPES = Path(__file__).parent.parent / "docs/recipes"
SBATCH = RECIPES / "slurm.sh"
CONFIG, RAYJOB = yaml.safe_load_all((RECIPES / "rayjob.yaml").read_text())
RUN_SH: str = CONFIG["data"]["run.sh"]
RAY_CLUSTER = RAYJOB["spec"]["rayClusterSpec"]
PODS = [RAY_CLUSTER["headGroupSpec"], *RAY_CLUSTER["workerGroupSpecs"]]


def pod_spec(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]


def scripts() -> dict[str, str]:
    """All shell that a recipe has, by where."""
    hooks = {
        container["name"]: container["lifecycle"]["preStop"]["exec"]["command"][-1]
        for group in PODS
        for container in pod_spec(group)["containers"]
    }
    return {"sbatch": SBATCH.read_text(), "run.sh": RUN_SH, **hooks}


@pytest.mark.parametrize("name", scripts())
def test_the_shell_is_right(name: str) -> None:
    found = subprocess.run(["bash", "-n"], input=scripts()[name], capture_output=True, text=True, check=True)
    assert not found.stderr
    if shutil.which("shellcheck"):
        shell = ("shellcheck", "--shell=bash", "--severity=warning", "-")
        found = subprocess.run(shell, input=scripts()[name], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", ["sbatch", "run.sh"])
def test_options_exist(name: str) -> None:
    group: Any = typer.main.get_command(app)
    known = {option for param in group.commands["exec"].params for option in param.opts}
    words = re.findall(r"--[a-z][a-z-]*", re.sub(r"(?m)^.*(ray start|srun).*$|^#.*$", "", scripts()[name]))
    assert {"--resume", "--run-dir", "--set", "--address"} <= set(words) & known
    assert set(words) <= known


def test_a_checkpoint_fits_into_what_is_granted() -> None:
    """Of the time between the notice and the end, `run.grace` leaves a minute to Ray and the exports."""
    [granted] = re.findall(r"--signal=B:TERM@(\d+)", SBATCH.read_text())
    [sbatch_grace] = re.findall(r"run\.grace=(\d+)", SBATCH.read_text())
    [job_grace] = re.findall(r"run\.grace=(\d+)", RUN_SH)
    assert int(sbatch_grace) + 60 <= int(granted)
    for group in PODS:
        assert int(job_grace) + 60 <= pod_spec(group)["terminationGracePeriodSeconds"]


def test_every_pod_has_the_run_folder() -> None:
    folder = re.findall(r"cd (\S+)", RUN_SH)
    for group in PODS:
        spec = pod_spec(group)
        volumes = {v["name"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
        for container in spec["containers"]:
            assert [m["mountPath"] for m in container["volumeMounts"] if m["name"] in volumes] == folder


def test_the_entrypoint_outlives_two_shells() -> None:
    """KubeRay's, and that of `ray job submit`, which quotes words as Windows does."""
    words = shlex.split(RAYJOB["spec"]["entrypoint"])
    assert shlex.split(subprocess.list2cmdline(words)) == words and not set("$`") & set("".join(words))
    head = pod_spec(RAY_CLUSTER["headGroupSpec"])
    [volume] = [
        v["name"] for v in head["volumes"] if v.get("configMap") == {"name": CONFIG["metadata"]["name"]}
    ]
    [mount] = [m["mountPath"] for m in head["containers"][0]["volumeMounts"] if m["name"] == volume]
    assert words == ["bash", f"{mount}/run.sh"]
