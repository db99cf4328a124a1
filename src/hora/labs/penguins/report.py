"""A page about a finished lab: one HTML file with its pictures inside. It only formats what it is given."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Report"]

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2430; max-width: 62rem; margin: 2.5rem auto;
  padding: 0 1rem }
h1 { font-size: 1.9rem; margin-bottom: .2rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0 }
th, td { text-align: left; padding: .3rem 1.1rem .3rem 0; border-bottom: 1px solid #e5e7eb }
th { color: #6b7280; font-weight: 600 } img { max-width: 100% }
pre { background: #f6f7f9; padding: .8rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: .85rem }
"""


@dataclass
class Report:
    """Collects paragraphs, tables and pictures; `write` makes the file."""

    title: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """A section begins."""
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A paragraph."""
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def code(self, text: str) -> None:
        """Text as it is."""
        self.parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table."""
        lines = [("th", header), *(("td", row) for row in rows)]
        cells = ("".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row) for tag, row in lines)
        self.parts.append("<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>")

    def picture(self, path: str | Path, description: str) -> None:
        """A PNG, put into the page itself."""
        data = base64.b64encode(Path(path).read_bytes()).decode()
        self.parts.append(f'<img alt="{html.escape(description)}" src="data:image/png;base64,{data}">')

    def write(self, path: str | Path) -> Path:
        """The page."""
        title = html.escape(self.title)
        head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        page = "\n".join([head, f"<style>{_STYLE}</style>", f"<h1>{title}</h1>", *self.parts, "</html>"])
        Path(path).write_text(page, encoding="utf-8")
        return Path(path)
