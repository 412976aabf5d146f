"""What a checkpoint says of itself: ``manifest.json``, written last, without which there is no checkpoint.

It lists every tensor of the run's state (`hflow.plan.run_state`) with the pieces that it was written in, and
every file with its size and checksum, and ends with its own. Files are in safetensors' format; nothing is
ever unpickled. Whoever reads a checkpoint believes nothing that stands in it.
"""

from __future__ import annotations

import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hflow.bounded_read import UnreadableError, parse_json, read_text
from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.layout import Box, intersect, volume

FORMAT = 1
NAME = "manifest.json"
MAX_BYTES = 2**28
MAX_PIECES = 2**14  # of one tensor
FILE_NAME = re.compile(r"rank-\d{5}\.safetensors", re.ASCII)
SEALED = re.compile(r'(\{.*),"crc32":(\d{1,10})\}\s*', re.ASCII | re.DOTALL)

StoredDType = Literal["f32", "bf16", "i64", "i32", "i16", "bool", "str"]
ITEM_BYTES: dict[StoredDType, int] = {"f32": 4, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "bool": 1, "str": 1}
StoredNumber = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: `box` (global indices) lies in a file under a key."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid", "strict": True}

    file: str
    key: str
    box: tuple[tuple[StoredNumber, StoredNumber], ...]


@dataclass(frozen=True)
class StoredState:
    """A tensor and its pieces, which cover it and do not overlap."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid", "strict": True}

    dtype: StoredDType
    shape: tuple[StoredNumber, ...]
    pieces: Annotated[tuple[Piece, ...], Field(max_length=MAX_PIECES)]


@dataclass(frozen=True)
class StoredFile:
    """`crc32`: of all its bytes."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid", "strict": True}

    size_bytes: StoredNumber
    crc32: StoredNumber


@dataclass(frozen=True)
class Manifest:
    """The state of a run after `step` steps.

    Attributes:
        format: of the checkpoint, `FORMAT`.
        hflow: the version that wrote it.
        time: seconds since the epoch.
        graph: the graph's name.
        graph_hash, plan_hash: of what was run.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid", "strict": True}

    format: int
    hflow: str
    time: float
    step: StoredNumber
    graph: str
    graph_hash: str
    plan_hash: str
    files: dict[str, StoredFile]
    tensors: dict[str, StoredState]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


_ADAPTER = TypeAdapter(Manifest)


def name_of(step: int) -> str:
    """The name of the folder with the checkpoint of a step."""
    return f"step-{step:08d}"


def to_json(manifest: Manifest) -> str:
    return sealed(_ADAPTER.dump_json(manifest).decode())


def sealed(text: str) -> str:
    """A JSON object with its CRC-32 as its last entry."""
    return f'{text[:-1]},"crc32":{zlib.crc32(text.encode())}}}\n'


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, whose files have the sizes that it says.

    Raises:
        HflowError: HF412 when there is none, when files are missing or of another size (the checkpoint is
            torn), and when it is of another format or says what cannot be (it is foreign). Links are not
            followed.
    """
    if (problem := _bad_kind(folder, stat.S_ISDIR)) or (problem := _bad_kind(folder / NAME, stat.S_ISREG)):
        raise damaged(folder, problem)
    try:
        text = read_text(folder / NAME, MAX_BYTES)
        found = parse_json(text)
    except UnreadableError as error:
        raise damaged(folder, f"{NAME} cannot be read: {error}") from None
    version = found.get("format") if isinstance(found, dict) else None
    if isinstance(version, int) and version != FORMAT:
        help_ = f"this hflow reads format {FORMAT}; go on with the hflow that wrote it"
        raise damaged(folder, f"it has format {version}", help_)
    return _checked(folder, text)


def _checked(folder: Path, text: str) -> Manifest:
    seal = SEALED.fullmatch(text)
    if seal is None or zlib.crc32(f"{seal[1]}}}".encode()) != int(seal[2]):
        raise damaged(folder, f"the checksum of {NAME} is not that of what was written")
    try:
        manifest = _ADAPTER.validate_json(f"{seal[1]}}}")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise damaged(folder, f"{NAME}: `{place}`: {first['msg']}") from None
    if folder.name != name_of(manifest.step):
        raise damaged(folder, f"{NAME} is that of step {manifest.step}")
    for problem in chain(_bad_files(folder, manifest), _bad_tensors(manifest), _bad_sizes(manifest)):
        raise damaged(folder, problem)
    return manifest


def damaged(folder: Path, problem: str, help_: str = "") -> HflowError:
    """A checkpoint that cannot be used."""
    return HflowError(Diagnostic("HF412", f"checkpoint `{folder}` cannot be used: {problem}", help=help_))


def _bad_kind(path: Path, is_right: Callable[[int], bool]) -> str:
    """What is wrong with the kind of a file or folder; a link is never right."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        return f"`{path.name}`: {error.strerror}"
    kind = "folder" if is_right is stat.S_ISDIR else "regular file"
    return "" if is_right(mode) else f"`{path.name}` is no {kind}"


def _bad_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    for name, file in manifest.files.items():
        if not FILE_NAME.fullmatch(name):
            yield f"{NAME}: `{name}` is no name of a checkpoint's file"
            return
        if problem := _bad_kind(folder / name, stat.S_ISREG):
            yield problem
            return
        size = (folder / name).lstat().st_size
        if size != file.size_bytes:
            yield f"`{name}` has {size:,} bytes of {file.size_bytes:,}"


def _bad_tensors(manifest: Manifest) -> Iterator[str]:
    for name, tensor in manifest.tensors.items():
        whole: Box = tuple((0, size) for size in tensor.shape)
        for piece in tensor.pieces:
            if piece.file not in manifest.files:
                yield f"{NAME}: tensor `{name}` names the file `{piece.file}`, which is not listed"
            if not _is_inside(piece.box, whole):
                yield f"{NAME}: tensor `{name}` has a piece {piece.box} outside its shape {tensor.shape}"
        boxes = sorted(piece.box for piece in tensor.pieces)
        if sum(map(volume, boxes)) != volume(whole) or _overlap(boxes):
            yield f"{NAME}: the pieces of tensor `{name}` do not make up the whole"


def _bad_sizes(manifest: Manifest) -> Iterator[str]:
    """No tensor is larger than the file that is said to hold it."""
    held = Counter[str]()
    seen: set[tuple[str, str]] = set()
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            held[piece.file] += volume(piece.box) * ITEM_BYTES[tensor.dtype]
            if (piece.file, piece.key) in seen:
                yield f"{NAME}: tensor `{name}` has a piece that is another's, too"
            seen.add((piece.file, piece.key))
    for name, size in held.items():
        if size > manifest.files[name].size_bytes:
            yield f"{NAME}: the tensors in `{name}` are larger than the file"


def _is_inside(box: Box, whole: Box) -> bool:
    return len(box) == len(whole) and all(a <= c <= d <= b for (c, d), (a, b) in zip(box, whole))


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two of the sorted boxes do: one can only overlap with those that begin before it ends."""
    for i, box in enumerate(boxes):
        for other in (boxes[k] for k in range(i + 1, len(boxes))):
            if box and other[0][0] >= box[0][1]:
                break
            if intersect(box, other) is not None:
                return True
    return False


def pieces_in(tensor: StoredState, box: Box) -> Iterator[tuple[Piece, Box]]:
    """The pieces that have a part of `box`, and that part (global indices)."""
    for piece in tensor.pieces:
        common = intersect(piece.box, box)
        if common is not None:
            yield piece, common
