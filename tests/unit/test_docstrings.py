"""Docstrings begin with a verb or the field's term, never with a question."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
QUESTIONS = {"What", "Where", "Who", "Whose", "Whether", "How", "Which"}


@pytest.mark.parametrize("package", ["hora", "horovod", "sparkdl"])
def test_no_docstring_begins_with_a_question(package):
    found = []
    for path in sorted((SRC / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].rstrip(",:") in QUESTIONS:
                    found.append(f"{path.relative_to(SRC)}: {getattr(node, 'name', 'module')}: {' '.join(words[:8])}")
    assert not found, "\n".join(found)
