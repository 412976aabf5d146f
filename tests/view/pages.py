"""Reading our HTML pages."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags, and the addresses that a browser would load."""

    VOID = frozenset({"meta", "br", "link", "img", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(html: str) -> Page:
    page = Page()
    page.feed(html)
    assert not page.open
    return page
