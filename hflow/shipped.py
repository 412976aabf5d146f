"""Files that hflow ships, by name: algorithms and clusters."""

from __future__ import annotations

from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean


def find(name: str | Path, folder: str, what: str) -> Path:
    """A path as given; a bare name is looked up in `folder` here, then in that of hflow itself.

    Args:
        folder: ``algorithms`` or ``clusters``.
        what: what the files are, for messages.

    Raises:
        HflowError: HF001, with the names that there are.
    """
    path = Path(name)
    if path.is_file() or path.parent != Path() or path.suffix:
        return path
    package = Path(__file__).resolve().parent
    folders = (Path(folder), package / folder, package.parent / folder)  # here; installed; in the repository
    found = next((f / f"{name}.yaml" for f in folders if (f / f"{name}.yaml").is_file()), None)
    if found is None:
        known = sorted({file.stem for f in folders for file in f.glob("*.yaml")})
        near = did_you_mean(str(name), known)
        help_ = f"{near} {folder}: {', '.join(known)}" if near.endswith("?") else near
        raise HflowError(Diagnostic("HF001", f"no {what} `{name}`", help=help_))
    return found
