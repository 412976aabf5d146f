"""Whatever happens to the bytes of a checkpoint on a disk, it is refused, or what was written is read."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.diagnostics import HflowError
from hflow.runtime.checkpoint.manifest import NAME
from tests.checkpoint.written import FILES, load, values, write


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("good"))


def assert_refused_or_as_written(folder: Path) -> bool:
    """Whether it was read."""
    try:
        found = load(folder)
    except HflowError as error:
        assert [d.code for d in error.diagnostics] == ["HF412"]
        return False
    expected = values()
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == v.dtype and torch.equal(found[name], v) for name, v in expected.items())
    return True


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_flipped_cut_or_exchanged(good: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = shutil.copytree(good, Path(parent) / good.name)
        for file in data.draw(st.lists(st.sampled_from([NAME, *FILES]), min_size=1, max_size=2, unique=True)):
            content = bytearray((folder / file).read_bytes())
            for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
                content[at] ^= data.draw(st.integers(1, 255))
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
            match data.draw(st.sampled_from(["flip", "flip", "cut", "without", "twice", "zeros"])):
                case "cut":
                    del content[start:]
                case "without":
                    del content[start:stop]
                case "twice":
                    content[start:start] = content[start:stop]
                case "zeros":
                    content[start:stop] = bytes(stop - start)
                case _:
                    pass
            (folder / file).write_bytes(content)
        assert_refused_or_as_written(folder)


@pytest.mark.parametrize("file", [NAME, *FILES])
def test_every_single_byte_counts(good: Path, tmp_path: Path, file: str) -> None:
    """But for the line feed at the manifest's end, any other value of any byte is noticed."""
    folder = shutil.copytree(good, tmp_path / good.name)
    content = bytearray((folder / file).read_bytes())
    for at in range(len(content) - (file == NAME)):
        content[at] ^= 1
        (folder / file).write_bytes(content)
        assert not assert_refused_or_as_written(folder), at
        content[at] ^= 1
    (folder / file).write_bytes(content)
    assert assert_refused_or_as_written(folder)


def test_files_of_another_step(good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "step-00000004")
    assert not assert_refused_or_as_written(folder)
