"""Docstrings and comments that say "see `x`": the name is there, in the same module, or in the one that they name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
_SEE = re.compile(r"\b[Ss]ee `([A-Za-z_][\w.]*)`|\(`([a-z_]+\.[A-Z]\w*)`\)")


@cache
def _names() -> dict[str, set[str]]:
    """Return the names that each module defines at any depth: classes, functions, arguments, fields and constants."""
    found: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        parts = path.relative_to(SRC).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        names = found.setdefault(module, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                names |= {alias.asname or alias.name for alias in node.names}
    return found


def _resolves(name: str, module: str) -> bool:
    known = _names()
    if name in known or any(other.endswith(f".{name}") for other in known):
        return True  # a module
    scope, _, last = name.rpartition(".")
    if not scope:
        return last in known[module] or any(
            last in names for other, names in known.items() if other.startswith(module.rpartition(".")[0])
        )
    owners = [names for other, names in known.items() if other == scope or other.endswith(f".{scope}")]
    owners += [names for names in known.values() if scope.rpartition(".")[2] in names]
    return any(last in names for names in owners)


def test_every_name_that_a_text_refers_to_is_defined():
    gone = []
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in _SEE.finditer(line):
                name = match[1] or match[2]
                if not _resolves(name, module):
                    gone.append(f"{path.relative_to(SRC)}:{number}: {name}")
    assert not gone, "\n".join(gone)
