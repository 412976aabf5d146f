"""Links between files of the repository, as links between pages of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path

from scripts.site.sitemap import ROOT, Sitemap

CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:!\[[^\]]*\]\([^)]*\)|[^\]])*)\]\(([^)\s]+)\)")
ATTRIBUTE = re.compile(r"\b(href|src)=\"([^\"]+)\"")


def moved_links(text: str, source: str, page: str, site: Sitemap) -> str:
    """The text of the file `source`, for the page `page` of the site."""
    parts = CODE.split(text)
    joined = "".join(f"\0{n}\0" if n % 2 else part for n, part in enumerate(parts))
    joined = _moved(joined, source, page, site)
    return re.sub(r"\0(\d+)\0", lambda found: parts[int(found[1])], joined)


def _moved(text: str, source: str, page: str, site: Sitemap) -> str:
    def place(target: str) -> str:
        return _place(target, source, page, site)

    def link(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        to, inner = place(target), LINK.sub(link, label)
        return f"{image}[{inner}]({to})" if to else inner

    text = LINK.sub(link, text)
    return ATTRIBUTE.sub(lambda found: f'{found[1]}="{_html(place(found[2]))}"', text)


def _place(target: str, source: str, page: str, site: Sitemap) -> str:
    """A link's target as seen from `page`; empty where the site has nothing to show."""
    if re.match(r"\w+:|#", target):
        return target
    path, hash_, fragment = target.partition("#")
    there = site.place((ROOT / source).parent.joinpath(path).resolve())
    return f"{os.path.relpath(there, Path(page).parent)}{hash_}{fragment}" if there else ""


def _html(target: str) -> str:
    """Only links in Markdown are turned into links to pages by what makes the site."""
    return target.replace(".md", ".html") if not re.match(r"\w+:", target) else target
