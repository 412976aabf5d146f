"""The wheel, made from the source distribution and installed outside of the checkout, is all that hflow needs
of itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ("params.batch=4", "params.group=2", "params.steps=2", "params.minibatch=4", "params.holdout=4")

pytestmark = [pytest.mark.slow, pytest.mark.rotating(6)]


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, timeout=240)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is installed, without the packages that it needs, which are here."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


def run(site: Path, folder: Path, *words: str) -> str:
    """What `hflow` of the wheel prints, with nothing of the checkout in reach."""
    program = "import hflow, sys; assert hflow.__file__.startswith(sys.argv.pop(1)), hflow.__file__;"
    program += "from hflow.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, str(site), *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_says_what_it_is(wheel: Path) -> None:
    assert re.fullmatch(r"hflow_rlhf-\d+\.\d+.*-py3-none-any\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (metadata,) = (file.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
    assert "hflow/py.typed" in names
    for folder in ("algorithms", "clusters"):
        assert {f"hflow/{folder}/{file.name}" for file in (ROOT / folder).glob("*.yaml")} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    assert "Provides-Extra: sglang" in metadata


def test_its_source_is_what_the_package_needs(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.split("/")[1] for name in file.getnames()}
    assert {"hflow", "algorithms", "clusters", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert not names & {"tests", "benchmarks", "docs", ".venv"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a copy without its history")
def test_its_version_is_that_of_the_tag(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path / "clone")]
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    subprocess.run([*git, "tag", "v7.8.9"], check=True)
    pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(tmp_path / "clone"))
    assert (tmp_path / "hflow_rlhf-7.8.9-py3-none-any.whl").exists()


def test_it_checks_compiles_and_runs_what_it_ships(wheel: Path, site: Path, tmp_path: Path) -> None:
    said = run(site, tmp_path, "--version").split()[1]
    assert wheel.name == f"hflow_rlhf-{said}-py3-none-any.whl"
    assert "grpo" in run(site, tmp_path, "check", "grpo")
    shape = ("--set", "params.model=shape:qwen2.5-0.5b")
    assert ", proven best" in run(site, tmp_path, "compile", "grpo", "--cluster", "h100x8", *shape)
    run(
        site, tmp_path, "new-model", "model", "--layers", "1", "--hidden", "32", "--heads", "2", "--ffn", "64"
    )
    few = [word for value in SMALL for word in ("--set", value)]
    model = ("--set", "params.model=model", "--cluster", "local1", "--workers", "inline")
    run(site, tmp_path, "exec", "grpo", *model, *few, "--run-dir", "run")
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run/export/actor/model.safetensors").is_file()
    made_from = run(site, tmp_path, "show", "--from", "run/export/actor")
    assert made_from == (tmp_path / "run/graph.yaml").read_text()
