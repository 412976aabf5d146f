"""What of the repository is a page of the site, where it is there, and which files lie beside the pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = {"README.md": "index.md", "algorithms/README.md": "algorithms/index.md"}
FOLDERS = {".": ".", "docs": ".", "docs/museum": "museum", "examples/*": "examples"}  # of further pages


@dataclass
class Sitemap:
    """`pages`: by their path in the repository; `algorithms`: those that have a page; `files`: what is copied
    as links ask for it, by its path in the repository."""

    pages: dict[str, str]
    algorithms: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict[str, str])

    @staticmethod
    def of_repository() -> Sitemap:
        algorithms = tuple(sorted(file.stem for file in (ROOT / "algorithms").glob("*.yaml")))
        return Sitemap({**PAGES, **dict(_further())}, algorithms)

    def place(self, path: Path) -> str:
        """Where in the site a file or folder of the repository is: the page that it became, the page of an
        algorithm, or a copy. Empty for a folder without a page."""
        name = str(path.relative_to(ROOT))
        if path.is_dir():
            return self.pages.get(f"{name}/README.md", "")
        if name in self.pages:
            return self.pages[name]
        if path.parent.name == "algorithms" and path.suffix == ".yaml":
            return f"algorithms/{path.stem}.md"
        return self.files.setdefault(name, f"files/{name}")


def _further() -> Iterator[tuple[str, str]]:
    for folder, target in FOLDERS.items():
        for file in sorted(ROOT.glob(f"{folder}/*.md")):
            source = str(file.relative_to(ROOT))
            if source not in PAGES:
                yield source, str(Path(target) / _name(file, target))


def _name(file: Path, target: str) -> str:
    """A folder's own page is its index, or if there are several of them is called as the folder."""
    if file.name != "README.md":
        return file.name
    return "index.md" if file.parent.name == target else f"{file.parent.name}.md"
