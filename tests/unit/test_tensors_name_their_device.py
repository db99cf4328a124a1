"""Tensors that the engine and the front ends create ignore torch's default device and dtype."""

from __future__ import annotations

import ast
from pathlib import Path

HORA = Path(__file__).parents[2] / "src" / "hora"
MAKERS = {
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "scalar_tensor",
    "as_tensor",
    "asarray",
    "eye",
    "rand",
    "randn",
}


def test_every_new_tensor_names_its_device():
    for room in ("engine", "torch"):
        for path in sorted((HORA / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                made = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS
                if made and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
                    names = {keyword.arg for keyword in node.keywords}
                    assert "device" in names, f"{path.relative_to(HORA)}:{node.lineno} names no device"
