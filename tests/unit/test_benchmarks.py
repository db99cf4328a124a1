"""The names that benchmarks import exist; the benchmarks themselves run rarely."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def root_on_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def _imports(source: str) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name) of all imports: at the top, inside functions and in programs written as strings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\nimport " in node.value:
            yield from _imports(node.value)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_the_imports_of_a_benchmark_exist(path):
    for module, name in _imports(path.read_text()):
        if module.startswith("horovod.ray"):
            pytest.importorskip("ray")
        if module.startswith(("horovod.tensorflow", "horovod.keras")):
            pytest.importorskip("tensorflow")
        if module.split(".")[0] in ("hora", "horovod", "sparkdl", "benchmarks"):
            found = importlib.import_module(module)
            assert name is None or hasattr(found, name) or importlib.import_module(f"{module}.{name}")


def test_the_figures_of_the_readme_match_the_last_run():
    import json

    from benchmarks.readme import NUMBERS, README, figures, written

    assert written(README.read_text()) == figures(json.loads(NUMBERS.read_text()))
