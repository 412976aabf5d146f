"""Files and JSON read within limits, so that no file can fill the memory, hang, or crash who reads it.

Whoever reads a file of the user says how many bytes it may have. What is wrong is told as an
`UnreadableError`, whose text is one phrase; the caller makes it a diagnostic with a code and a place.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, cast

MAX_JSON_DEPTH = 64
CHUNK = 2**20  # bytes that one call reads

Reason = Literal["missing", "kind", "large", "text", "json", "os"]


class UnreadableError(Exception):
    """Why a file, or a text, cannot be used: `str` of it is a phrase like `it is a folder, no regular file`.

    `reason`: "missing" (no such file), "kind" (no regular file), "large", "text" (not UTF-8), "json", or
    "os" (anything else that the operating system says). `line`: of bad JSON, where that is known; from 1.
    """

    def __init__(self, reason: Reason, message: str, line: int | None = None):
        super().__init__(message)
        self.reason: Reason = reason
        self.line = line


def read_bytes(path: Path | str, limit: int) -> bytes:
    """All bytes of a regular file that has at most `limit` of them.

    Raises:
        UnreadableError: "missing", "kind", "large" or "os".
    """
    descriptor = _opened(path)
    try:
        return _read(descriptor, limit)
    except OSError as error:
        raise UnreadableError("os", _said(error)) from None
    finally:
        os.close(descriptor)


def read_lines(path: Path | str, limit: int) -> Iterator[bytes]:
    """The lines of a regular file of any size, without their ends; each has at most `limit` bytes.

    Raises:
        UnreadableError: "missing", "kind" or "os"; "large" for a longer line.
    """
    with os.fdopen(_opened(path), "rb", buffering=CHUNK) as file:
        try:
            yield from _lines(file, limit)
        except OSError as error:
            raise UnreadableError("os", _said(error)) from None


def read_text(path: Path | str, limit: int, encoding: Literal["utf-8", "utf-8-sig"] = "utf-8") -> str:
    """The text of a regular file of at most `limit` bytes; "utf-8-sig" drops a byte order mark.

    Raises:
        UnreadableError: as `read_bytes`, and "text" when it is not UTF-8.
    """
    try:
        return read_bytes(path, limit).decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableError("text", f"it is not UTF-8: {error.reason} at byte {error.start}") from None


def read_json(path: Path | str, limit: int) -> Any:
    """The value in a JSON file of at most `limit` bytes.

    Raises:
        UnreadableError: as `read_text` and `parse_json`.
    """
    return parse_json(read_text(path, limit))


def parse_json(text: str, max_depth: int = MAX_JSON_DEPTH, allow_nan: bool = True) -> Any:
    """The value that `text` holds: no key twice in one object, no character that UTF-8 cannot write, at most
    `max_depth` lists and objects inside each other.

    `allow_nan`: whether `NaN`, `Infinity` and `-Infinity`, which Python's writer writes, are numbers.

    Raises:
        UnreadableError: "json".
    """
    constant = float if allow_nan else _refuse_constant
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise UnreadableError("json", f"bad JSON: {error}", error.lineno) from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise UnreadableError("json", f"bad JSON: {error}") from None
    _check(value, max_depth, "\\u" in text)
    return value


def _opened(path: Path | str) -> int:
    """A descriptor of a regular file. It is opened first and asked for its kind then, so nobody can change it
    in between; opening does not wait for the other end of a FIFO."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise UnreadableError("missing", _said(error)) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null character or a lone surrogate
        raise UnreadableError("os", _said(error)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UnreadableError("kind", f"it is {_kind(mode)}, no regular file")
    return descriptor


def _lines(file: IO[bytes], limit: int) -> Iterator[bytes]:
    while line := file.readline(limit + 1):
        if len(line) > limit:
            raise UnreadableError("large", f"it has a line of more than {limit} bytes")
        yield from line.splitlines()  # at every carriage return, too


def _read(descriptor: int, limit: int) -> bytes:
    found = os.fstat(descriptor)
    if found.st_size > limit:
        raise _too_large(limit)
    content = bytearray()  # the size is not trusted: a file may grow, and those of /proc have size 0
    while chunk := os.read(descriptor, min(CHUNK, limit + 1 - len(content))):
        content += chunk
        if len(content) > limit:
            raise _too_large(limit)
    return bytes(content)


def _said(error: OSError | ValueError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _too_large(limit: int) -> UnreadableError:
    return UnreadableError("large", f"it is larger than {limit} bytes")


def _too_deep(max_depth: int) -> UnreadableError:
    return UnreadableError("json", f"bad JSON: nested deeper than {max_depth} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) == len(pairs):
        return entries
    seen: set[str] = set()
    twice = next(key for key, _ in pairs if key in seen or seen.add(key))
    raise UnreadableError("json", f"bad JSON: duplicate key {twice!a}")


def _refuse_constant(name: str) -> NoReturn:
    raise UnreadableError("json", f"bad JSON: {name} is no JSON number")


def _check(value: Any, max_depth: int, escapes: bool) -> None:
    """Refuse what is nested too deeply, and with `escapes` (only these make them) lone surrogates."""
    level: list[Any] = [value]
    depth = 0
    while level:
        if escapes and (bad := next(filter(_is_broken, level), None)) is not None:
            raise UnreadableError(
                "json", f"bad JSON: the text {bad!a} has a lone surrogate, half a character"
            )
        below: list[Any] = []
        for inner in level:
            below += _inside(inner)
        containers = any(isinstance(inner, dict | list) for inner in level)
        depth += containers
        if depth > max_depth:
            raise _too_deep(max_depth)
        level = below


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return (*entries, *entries.values())
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _is_broken(value: Any) -> bool:
    return isinstance(value, str) and is_broken_text(value)


def is_broken_text(text: str) -> bool:
    """Whether a text has a lone surrogate, which no file and no terminal can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
