"""A checkpoint that somebody made to do harm is refused (HF412): nothing outside its folder is opened,
nothing in it is run, and it takes no more memory than it has bytes."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hflow.diagnostics import HflowError
from hflow.runtime.checkpoint.manifest import FORMAT, NAME, sealed
from tests.checkpoint.watching import audited, opened_in
from tests.checkpoint.written import FILES, STEP, joined, load, say_so, split, tree_of, values, write
from tests.limits import memory_limited_to

FIRST = "models/actor/weights/a"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "run" / "checkpoints")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with another checkpoint's files, which must not be opened."""
    folder = tmp_path / "outside"
    write(folder)
    for file in (folder / f"step-{STEP:08d}").iterdir():
        shutil.copy(file, folder / file.name)
    return folder


def refused(folder: Path, outside: Path) -> str:
    """What is said of a checkpoint; nothing else happens."""
    load(outside / f"step-{STEP:08d}")  # what is imported at the first time
    watched = opened_in(outside), pytest.raises(HflowError), memory_limited_to(2**28), audited()
    with watched[0] as others, watched[1] as caught, watched[2], watched[3] as told:
        load(folder)
    assert others == []
    place = os.path.realpath(folder)
    assert all(event == "open" and os.path.realpath(path).startswith(place) for event, path in told), told
    (found,) = caught.value.diagnostics
    assert found.code == "HF412" and str(folder) in found.message
    return found.message


def test_the_watch_sees(outside: Path) -> None:
    """An open by a library that tells Python nothing of it, too."""
    with opened_in(outside) as names, audited() as told:
        load_file(outside / FILES[0])
        pickle.loads(b"cos\ngetpid\n(tR.")
    assert FILES[0] in names and ("pickle.find_class", "('os',)") in told


def test_what_was_written_is_read(folder: Path) -> None:
    found = load(folder)
    assert found.keys() == values().keys()
    for name, expected in values().items():
        assert found[name].dtype == expected.dtype and torch.equal(found[name], expected)
    assert {key for file in FILES for key in load_file(folder / file)} >= values().keys()


Header = dict[str, Any]


def _entry(header: Header, **changes: Any) -> Header:
    name, entry = next(iter(header.items()))
    return header | {name: entry | changes}


def _moved_to_the_start(entry: Header) -> Header:
    start, end = entry["data_offsets"]
    return entry | {"data_offsets": [0, end - start]}


HEADERS: dict[str, tuple[Callable[[Header], Header | str], str]] = {
    "beyond the file": (lambda h: _entry(h, data_offsets=[10**6, 10**6 + 24]), "overlap or leave a gap"),
    "overlapping": (
        lambda h: {
            k: v | {"data_offsets": [0, v["data_offsets"][1] - v["data_offsets"][0]]} for k, v in h.items()
        },
        "overlap or leave a gap",
    ),
    "a gap": (lambda h: dict(list(h.items())[1:]), "overlap or leave a gap"),
    "negative": (lambda h: _entry(h, data_offsets=[-24, 0]), "cannot be"),
    "backwards": (lambda h: _entry(h, data_offsets=[24, 0]), "cannot be"),
    "no numbers": (lambda h: _entry(h, data_offsets=[False, True]), "cannot be"),
    "huge": (lambda h: _entry(h, shape=[2**62, 2**62]), "another size than its shape"),
    "overflow": (lambda h: _entry(h, shape=[2**63]), "cannot be"),
    "wrapped": (lambda h: _entry(h, shape=[2**32, 2**32, 0]), "another size than its shape"),
    "other shape": (lambda h: _entry(h, shape=[6, 1]), "is not what the manifest says"),
    "other dtype": (lambda h: _entry(h, dtype="I32"), "is not what the manifest says"),
    "unknown dtype": (lambda h: _entry(h, dtype="F128"), "cannot be"),
    "no dtype": (lambda h: _entry(h, dtype=None), "cannot be"),
    "more": (lambda h: _entry(h, file="/etc/passwd"), "cannot be"),
    "no entry": (lambda h: h | {FIRST: []}, "cannot be"),
    "no object": (lambda h: "[]", "no JSON object"),
    "no JSON": (lambda h: "{", "bad JSON"),
    "deep": (lambda h: "[" * 10**5, "nested deeper"),
    "twice": (lambda h: json.dumps(h)[:-1] + "," + json.dumps(h)[1:], "duplicate key"),
    "renamed": (lambda h: {f"{k}x": v for k, v in h.items()}, "there is no tensor"),
    "empty": (lambda h: "", "bad JSON"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies(folder: Path, outside: Path, case: str) -> None:
    change, problem = HEADERS[case]
    header, data = split((folder / FILES[0]).read_bytes())
    (folder / FILES[0]).write_bytes(joined(change(header), data))
    say_so(folder)
    told = refused(folder, outside)
    assert f"`{FILES[0]}`: " in told and problem in told


@pytest.mark.parametrize("length", [2**63, 2**40, 10**8 + 1, 10**4, 0])
def test_a_length_of_the_header_that_lies(folder: Path, outside: Path, length: int) -> None:
    content = (folder / FILES[0]).read_bytes()
    (folder / FILES[0]).write_bytes(length.to_bytes(8, "little") + content[8:])
    say_so(folder)
    assert f"`{FILES[0]}`: " in refused(folder, outside)


def test_a_huge_header_that_is_there(folder: Path, outside: Path) -> None:
    with (folder / FILES[0]).open("wb") as file:
        file.write((2**27).to_bytes(8, "little"))
        file.truncate(2**27 + 8)
    say_so(folder)
    assert "its header is said to have 134,217,728 bytes" in refused(folder, outside)


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 3",)


def _saved() -> bytes:
    buffer = io.BytesIO()
    torch.save(values(), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("content", [pickle.dumps(Harm()), pickle.dumps(Harm(), 0), _saved(), b""])
def test_a_pickle_by_another_name(folder: Path, outside: Path, content: bytes) -> None:
    (folder / FILES[0]).write_bytes(content)
    say_so(folder)
    refused(folder, outside)


NAMES = (
    "../../../outside/{}",
    "{outside}/{}",
    "/etc/passwd",
    "..",
    "",
    "a/../{}",
    "{}\0",
    "{}\n",
    "RANK",
    ".",
)


@pytest.mark.parametrize("text", NAMES)
def test_names_that_lead_elsewhere(folder: Path, outside: Path, text: str) -> None:
    name = text.replace("{outside}", str(outside)).replace("{}", FILES[0])
    tree = json.loads(json.dumps(tree_of(folder)).replace(FILES[0], "NAME"))
    tree["files"][name] = tree["files"].pop("NAME")
    for piece in (p for tensor in tree["tensors"].values() for p in tensor["pieces"]):
        piece["file"] = name if piece["file"] == "NAME" else piece["file"]
    (folder / NAME).write_text(sealed(json.dumps(tree)))
    assert "is no name of a checkpoint's file" in refused(folder, outside)


@pytest.mark.parametrize("name", [*FILES, NAME])
@pytest.mark.parametrize("kind", ["link", "pipe", "device", "folder", "socket", "missing"])
def test_no_regular_file(folder: Path, outside: Path, name: str, kind: str) -> None:
    (folder / name).unlink()
    match kind:
        case "link":
            (folder / name).symlink_to(outside / name)
        case "device":
            (folder / name).symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(folder / name)
        case "folder":
            (folder / name).mkdir()
        case "socket":
            os.mknod(folder / name, 0o140600)
        case _:
            pass
    told = refused(folder, outside)
    assert f"`{name}`" in told and ("no regular file" in told or kind == "missing")


def test_the_folder_is_a_link(folder: Path, outside: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(outside / f"step-{STEP:08d}", target_is_directory=True)
    assert "is no folder" in refused(folder, outside)


Tree = dict[str, Any]


def _tensor(tree: Tree, **changes: Any) -> None:
    tree["tensors"][FIRST] |= changes


def _piece(tree: Tree, **changes: Any) -> None:
    tree["tensors"][FIRST]["pieces"][0] |= changes


HUGE = [[0, 2**62], [0, 4]]
HALVES = [
    {"file": FILES[0], "key": FIRST, "box": [[0, 2**39]]},
    {"file": FILES[1], "key": f"{FIRST}1", "box": [[2**39, 2**40]]},
]
MANIFESTS: dict[str, tuple[Callable[[Tree], object], str]] = {
    "another format": (lambda t: t.update(format=FORMAT + 1), f"has format {FORMAT + 1}"),
    "no format": (lambda t: t.pop("format"), "`format`"),
    "format as text": (lambda t: t.update(format="1"), "`format`"),
    "another step": (lambda t: t.update(step=10**9), "is that of step 1000000000"),
    "negative step": (lambda t: t.update(step=-1), "`step`"),
    "unknown key": (lambda t: t.update(load="os.system"), "`load`"),
    "unknown dtype": (lambda t: _tensor(t, dtype="object"), "dtype"),
    "another dtype": (lambda t: _tensor(t, dtype="i32"), "is not what the manifest says"),
    "outside": (lambda t: _piece(t, box=[[0, 9], [0, 2]]), "outside its shape"),
    "backwards": (lambda t: _piece(t, box=[[3, 0], [0, 2]]), "outside its shape"),
    "negative box": (lambda t: _piece(t, box=[[-3, 0], [0, 2]]), "box"),
    "no box": (lambda t: _piece(t, box=[]), "outside its shape"),
    "too little": (lambda t: t["tensors"][FIRST]["pieces"].pop(), "do not make up the whole"),
    "twice": (lambda t: _piece(t, box=[[0, 3], [2, 4]]), "do not make up the whole"),
    "another's": (lambda t: _piece(t, key=f"{FIRST}2"), "another's, too"),
    "another key": (lambda t: _piece(t, key="x"), "there is no tensor `x`"),
    "unlisted file": (lambda t: _piece(t, file="rank-00007.safetensors"), "not listed"),
    "huge": (
        lambda t: _tensor(t, shape=[2**62, 4], pieces=[{"file": FILES[0], "key": FIRST, "box": HUGE}]),
        "larger than the file",
    ),
    "huge, in parts": (lambda t: _tensor(t, shape=[2**40], pieces=HALVES), "larger than the file"),
    "overflow": (lambda t: _tensor(t, shape=[2**64, 4]), "shape"),
    "many pieces": (lambda t: _tensor(t, pieces=t["tensors"][FIRST]["pieces"] * 10**4), "pieces"),
    "no number": (lambda t: _tensor(t, shape=["6", 4]), "shape"),
    "fraction": (lambda t: _tensor(t, shape=[6.0, 4]), "shape"),
    "size": (lambda t: t["files"][FILES[0]].update(size_bytes=1), "bytes of 1"),
    "checksum": (lambda t: t["files"][FILES[0]].update(crc32=1), "checksum"),
    "no files": (lambda t: t.update(files={}), "not listed"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_lies(folder: Path, outside: Path, case: str) -> None:
    change, problem = MANIFESTS[case]
    tree = tree_of(folder)
    change(tree)
    (folder / NAME).write_text(sealed(json.dumps(tree)))
    assert problem in refused(folder, outside)


TEXTS = {
    "changed by hand": lambda text: text.replace('"g"', '"h"'),
    "key twice": lambda text: sealed(text[: text.rindex(',"crc32"')] + ',"step":3}'),
    "no checksum": lambda text: text[: text.rindex(',"crc32"')] + "}",
    "deep": lambda text: "[" * 10**5,
    "number of many digits": lambda text: text.replace('"step":3', f'"step":{"3" * 10**5}'),
    "list": lambda text: "[1]",
    "nothing": lambda text: "",
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_manifest_that_is_none(folder: Path, outside: Path, case: str) -> None:
    (folder / NAME).write_text(TEXTS[case]((folder / NAME).read_text()))
    assert NAME in refused(folder, outside)


def test_a_huge_manifest(folder: Path, outside: Path) -> None:
    with (folder / NAME).open("wb") as file:
        file.truncate(2**40)
    assert "larger than" in refused(folder, outside)
