"""Folders that go with their owner, though others may still write into them."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hflow.runtime.owned_folder import OwnedFolder
from tests.engines.sglang.servers import temporary_files_in


def test_a_folder_goes_with_what_bears_its_name(tmp_path: Path) -> None:
    forgotten: list[str] = []
    with temporary_files_in(tmp_path):
        folder = OwnedFolder("mine", forgotten.append)
        assert folder.path.stat().st_mode & 0o077 == 0 and folder.path.name.startswith("hflow-mine-")
        other = OwnedFolder("mine")
        assert folder.path.exists(), "it has an owner"
        folder.remove()
        folder.remove()
    assert set(forgotten) == {folder.path.name} and list(tmp_path.iterdir()) == [other.path]


@pytest.mark.parametrize("abandoned", [False, True])
def test_who_still_writes_into_it_is_outlasted(tmp_path: Path, abandoned: bool) -> None:
    """A process that ends a second later, whose files the first look does not find."""
    with temporary_files_in(tmp_path):
        folder = OwnedFolder("busy")
        busy = threading.Thread(target=_write, args=(folder.path / "logs", time.monotonic() + 1.0))
        busy.start()
        if abandoned:
            folder._lock.close()  # as the system does when a process is killed
            OwnedFolder("busy").remove()
        else:
            folder.remove()
        busy.join()
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_at_the_last_moment_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that appears after the last look and before the folder goes."""
    with temporary_files_in(tmp_path):
        folder = OwnedFolder("busy")
    late = [folder.path / "late"]
    remove = os.rmdir

    def rmdir(path: object, *args: object, **options: object) -> None:
        if late and str(path) == str(folder.path):
            late.pop().touch()
        remove(path, *args, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(os, "rmdir", rmdir)
    folder.remove()
    assert not late and list(tmp_path.iterdir()) == []


def _write(folder: Path, until: float) -> None:
    number = 0
    while time.monotonic() < until and folder.parent.exists():
        with suppress(FileNotFoundError):  # taken away meanwhile
            folder.mkdir(exist_ok=True)
            (folder / str(number := number + 1)).touch()
