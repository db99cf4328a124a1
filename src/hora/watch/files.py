"""The page as it is served: one HTML file with its styles inlined, for an early first paint, and one script."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import NamedTuple

__all__ = ["File", "site_files", "style_hash"]

_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "charts.js", "timeline.js", "page.js")


class File(NamedTuple):
    """Content served at a path."""

    body: bytes
    content_type: str


@functools.cache
def site_files() -> dict[str, File]:
    """By path."""
    html = _read("index.html").replace("<style></style>", f"<style>{_style()}</style>")
    script = '"use strict";\n' + "\n".join(map(_read, _SCRIPTS))
    return {
        "/": File(html.encode(), "text/html; charset=utf-8"),
        "/page.js": File(script.encode(), "text/javascript; charset=utf-8"),
    }


@functools.cache
def style_hash() -> str:
    """The source that the page's content security policy names: these styles and no others."""
    return "sha256-" + base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()


@functools.cache
def _style() -> str:
    return "\n".join(map(_read, _STYLES))


def _read(name: str) -> str:
    return resources.files("hora.watch").joinpath("site", name).read_text(encoding="utf-8")
