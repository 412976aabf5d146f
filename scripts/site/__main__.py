"""Write the pages of the site, of which MkDocs makes HTML (mkdocs.yml): `make site` does both.

    python -m scripts.site

Pages of the repository keep their text; links are made right, and graph files get a tab with Python. A page
for each algorithm and one of all commands are made from the code.
"""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree

from scripts.site.both_forms import with_python
from scripts.site.commands import commands_page
from scripts.site.gallery import algorithm_page, title_of
from scripts.site.learning import learning_page
from scripts.site.moved_links import moved_links
from scripts.site.sitemap import ROOT, Sitemap


def write_site(target: Path) -> None:
    """All pages, and the files that they link to, in the folder `target`, which is made anew."""
    rmtree(target, ignore_errors=True)
    site = Sitemap.of_repository()
    for source, page in site.pages.items():
        text = moved_links((ROOT / source).read_text(), source, page, site)
        write(target / page, with_python(text, source))
    for name in site.algorithms:
        print(f"{title_of(name)} …", flush=True)
        write(target / f"algorithms/{name}.md", algorithm_page(name))
    write(target / "learning.md", learning_page())
    write(target / "commands.md", commands_page())
    write(target / "site.css", (Path(__file__).parent / "site.css").read_text())
    for source, copy in site.files.items():
        path = target / copy
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / source).read_bytes())


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    write_site(ROOT / "build/site/pages")
