"""`hflow runs rm` removes runs and checkpoints, and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.report import remove_runs
from hflow.report.remove_runs import find_removable, remove
from hflow.report.runs import list_runs
from tests.report.run_folders import run_folder, running


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the runs `a` and `b`, each with checkpoints of steps 10 and 20."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        run_folder(tmp_path / "runs" / name, checkpoints=[10, 20])
    return Path("runs")


def rm(folder: Path, *names: str, force: bool = False) -> int:
    """Bytes that are free now."""
    found = find_removable(names, folder, force)
    for target in found:
        remove(target)
    return sum(target.size_bytes for target in found)


def refused(folder: Path, *names: str) -> list[str]:
    before = sorted(folder.rglob("*"))
    with pytest.raises(HflowError) as caught:
        rm(folder, *names)
    assert sorted(folder.rglob("*")) == before
    assert {d.code for d in caught.value.diagnostics} == {"HF407"}
    return [f"{d.message}; {d.help}" for d in caught.value.diagnostics]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["a", "runs/a", "runs/a/", "./runs/../runs/a"])
def test_by_name_or_path(runs: Path, name: str) -> None:
    assert rm(runs, name) > 200_000
    assert left(runs) == ["b"]


def test_an_absolute_path_elsewhere(runs: Path, tmp_path: Path) -> None:
    other = run_folder(tmp_path / "elsewhere" / "mine")
    rm(runs, str(other))
    assert not other.exists() and left(runs) == ["a", "b"]


def test_a_run_beside_is_found_by_name_after_those_in_the_folder(runs: Path) -> None:
    for name in ("a", "mine"):
        run_folder(Path(name))
    rm(runs, "a", "mine")
    assert left(runs) == ["b"] and Path("a").exists() and not Path("mine").exists()


def test_the_working_folder_may_be_the_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runs.absolute()
    monkeypatch.chdir(runs / "a")
    rm(Path("runs"), ".")
    assert left(whole) == ["b"]


def test_a_checkpoint(runs: Path) -> None:
    freed = rm(runs, "a@10", "runs/b@20")
    assert 200_000 < freed < 300_000
    assert {run.name: run.checkpoints for run in list_runs(runs)} == {"a": (20,), "b": (10,)}


def test_a_name_that_looks_like_a_checkpoint(runs: Path) -> None:
    run_folder(runs / "a@10")
    rm(runs, "a@10")
    assert left(runs) == ["a", "b"] and list_runs(runs)[0].checkpoints == (10, 20)


def test_a_run_and_its_checkpoint_are_removed_once(runs: Path) -> None:
    (target,) = find_removable(["a@10", "a", "runs/a"], runs)
    assert target.path == (runs / "a").absolute() and not target.is_checkpoint


def test_what_is_no_run(runs: Path) -> None:
    (runs / "notes").mkdir()
    (runs / "notes" / "text").write_text("")
    names = ["notes", "ab", "nowhere/x", "runs", "..", "/", "", "@3", "x" * 5000]
    told = refused(runs, *names)
    assert len(told) == len(names) and all("is no run folder" in text for text in told)
    assert "did you mean `" in told[1] and told[0].endswith("runs: a, b")


def test_when_one_is_refused_nothing_is_removed(runs: Path) -> None:
    (told,) = refused(runs, "a", "b@10", "nothing")
    assert "nothing" in told


def test_a_checkpoint_that_is_not_there(runs: Path) -> None:
    (told,) = refused(runs, "a@30")
    assert told.endswith("a` has no checkpoint of step 30; its checkpoints: 10, 20")
    shutil.rmtree(runs / "a" / "checkpoints")
    assert refused(runs, "a@30")[0].endswith("it has none")
    assert "is no run folder" in refused(runs, "c@30")[0]


def test_a_running_run_stays(runs: Path) -> None:
    run_folder(runs / "c", checkpoints=[10], **running(os.getpid()))
    told = refused(runs, "c", "c@10")
    assert all(f"is running (process {os.getpid()} on " in text and "--force" in text for text in told)
    rm(runs, "c@10", force=True)
    rm(runs, "c", force=True)
    assert left(runs) == ["a", "b"]


def test_a_run_on_another_host_stays(runs: Path) -> None:
    run_folder(runs / "c", **running(1, "another"))
    assert "is running (process 1 on another)" in refused(runs, "c")[0]


def test_a_run_that_may_be_running_stays(runs: Path) -> None:
    (runs / "a" / "summary.json").write_text("{")
    assert "has no summary" in refused(runs, "a")[0]
    rm(runs, "a", force=True)
    assert left(runs) == ["b"]


def test_a_run_that_died_goes(runs: Path) -> None:
    run_folder(runs / "c", **running(2**31 - 1))  # greater than any number that Linux gives
    rm(runs, "c")
    assert left(runs) == ["a", "b"]


def test_a_link_is_not_followed(runs: Path, tmp_path: Path) -> None:
    (runs / "link").symlink_to("a")
    (told,) = refused(runs, "link")
    assert "link` is a link" in told and (runs / "link").is_symlink()
    assert "is a link" in refused(runs, "runs/link/")[0]
    (runs / "a" / "checkpoints" / "step-30").symlink_to("step-10")
    assert "no checkpoint of step 30" in refused(runs, "a@30")[0]
    shutil.rmtree(runs / "b" / "checkpoints")
    (runs / "b" / "checkpoints").symlink_to(tmp_path / "runs" / "a" / "checkpoints")
    assert "no checkpoint of step 10" in refused(runs, "b@10")[0]


def test_what_links_within_a_run_lead_to_stays(runs: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    (runs / "a" / "folder").symlink_to(kept)
    (runs / "a" / "file").symlink_to(kept / "file")
    (runs / "a" / "checkpoints" / "step-10" / "folder").symlink_to(kept)
    rm(runs, "a@10")
    rm(runs, "a")
    assert left(runs) == ["b"] and (kept / "file").read_text() == "kept"


def test_a_removal_that_was_cut_short_can_be_repeated(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str | Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(remove_runs.shutil, "rmtree", fail)
        with pytest.raises(HflowError, match="HF407.*cannot remove .*Input/output error"):
            rm(runs, "a")
        with pytest.raises(HflowError, match="HF407"):
            rm(runs, "b@10")
    assert [(run.name, run.checkpoints) for run in list_runs(runs)] == [("a", (10, 20)), ("b", (20,))]
    rm(runs, "a", "b@10")
    assert left(runs) == ["b"] and left(runs / "b" / "checkpoints") == ["step-20"]
