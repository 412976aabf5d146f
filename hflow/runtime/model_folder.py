"""The files of a model folder, looked at before a library opens them: libraries read without limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hflow.bounded_read import UnreadableError, read_json
from hflow.diagnostics import Diagnostic, HflowError, Span
from hflow.plan.digests import MORE_TEMPLATES
from hflow.plan.vocabulary import MAX_TOKENIZER_BYTES

GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def check_files(folder: Path | str) -> None:
    """Raises HflowError HF406 unless all entries of `folder`, and of what transformers reads below, are
    regular files or folders: whoever opens a pipe waits for its other end, and a device never ends."""
    try:
        entries = [*Path(folder).iterdir(), *(Path(folder) / MORE_TEMPLATES).glob("*")]
        odd = [e for e in sorted(entries) if e.exists() and not (e.is_file() or e.is_dir())]
    except OSError as error:
        raise unusable(folder, f"it cannot be read: {error.strerror}") from None
    if odd:
        raise unusable(folder, f"`{odd[0].name}` is no regular file")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder, empty without the file.

    Raises:
        HflowError: HF406 when it cannot be read or holds something else.
    """
    try:
        found = read_json(file, MAX_TOKENIZER_BYTES)
    except UnreadableError as error:
        if error.reason == "missing":
            return {}
        raise unusable(file, f"it cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise unusable(file, "it is no JSON object")
    return found


def unusable(path: Path | str, problem: str, help_: str = "", span: Span | None = None) -> HflowError:
    return HflowError(Diagnostic("HF406", f"`{path}`: {problem}", span, help_))
