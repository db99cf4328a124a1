"""Every private name of torch that the source uses is in one table, and this torch has it."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed

from hora.torch.private import PRIVATE_NAMES, PrivateName

SOURCE = Path(__file__).parents[2] / "src"
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def is_private(path: str) -> bool:
    return path.startswith("torch.") and any(
        part.startswith("_") and not part.endswith("__") for part in path.split(".")
    )


def used(tree: ast.Module) -> Iterator[str]:
    """Yield the private paths from torch in a module: those that it imports, and the longest that it reads."""
    meant = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant |= {
                alias.asname or "torch": alias.name if alias.asname else "torch"
                for alias in node.names
                if alias.name.split(".")[0] == "torch"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            meant |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from filter(is_private, meant.values())

    def path(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return meant.get(node.id)
        if isinstance(node, ast.Attribute):
            before = path(node.value)
            return before and f"{before}.{node.attr}"
        return None

    yield from (
        found
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (found := path(node)) and is_private(found)
    )


def value(path: str) -> object:
    """Return what a path means: attributes of the longest module in it."""
    module, parts = path, list[str]()
    while True:
        with contextlib.suppress(ModuleNotFoundError):
            return functools.reduce(getattr, parts, importlib.import_module(module))
        module, _, part = module.rpartition(".")
        parts.insert(0, part)


def test_every_private_name_that_is_used_is_in_the_table():
    listed = {path for name in PRIVATE_NAMES for path in name.paths}
    beginnings = {path.rpartition(".")[0] for path in listed} | {"torch._C", "torch._C._distributed_c10d"}
    missing = {}
    for file in SOURCE.rglob("*.py"):
        for path in used(ast.parse(file.read_text())):
            within = any(path == known or path.startswith(f"{known}.") for known in listed)
            if not within and not any(start == path or start.startswith(f"{path}.") for start in beginnings):
                missing.setdefault(path, file.relative_to(SOURCE).as_posix())
    assert missing == {}


@pytest.mark.parametrize("name", PRIVATE_NAMES, ids=lambda name: name.path)
def test_this_torch_has_the_name(name: PrivateName):
    if name.since > VERSION:
        pytest.skip(f"torch {torch.__version__} is older than the name: {name.without}")
    for path in name.paths:
        assert value(path) is not None, name.without
