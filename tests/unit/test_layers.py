"""Imports flow one way, and importing does nothing and costs little."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
BASE = {"errors", "world", "config", "events", "wire", "control", "foreign", "logs"}
MAY_IMPORT = {
    "engine": BASE | {"engine"},
    "torch": BASE | {"engine", "torch", "horovod_util"},
    "launch": BASE | {"launch"},
    "workflow": BASE | {"engine", "torch", "data", "workflow", "runner", "horovod_runner"},
    "estimator": BASE | {"torch", "data", "estimator", "spark_run", "launch"},
    "data": BASE | {"torch", "data", "runner", "horovod_runner"},
}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _layers(path: Path) -> set[str]:
    layers = set()
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "hora" and len(parts) > 1:
            layers.add(parts[1])
    return layers - {"__version__"}


@pytest.mark.parametrize("layer", list(MAY_IMPORT))
def test_imports_flow_one_way(layer):
    for path in (SRC / "hora" / layer).rglob("*.py"):
        forbidden = _layers(path) & {p.stem for p in (SRC / "hora").iterdir()} - MAY_IMPORT[layer]
        assert not forbidden, f"{path.relative_to(SRC)} imports {sorted(forbidden)}"


def test_base_modules_import_only_base_modules():
    for name in BASE:
        path = SRC / "hora" / f"{name}.py"
        assert path.exists(), name
        assert _layers(path) <= BASE, f"{name} imports {sorted(_layers(path) - BASE)}"


def test_old_names_only_re_export():
    for package in ("horovod", "sparkdl"):
        for path in (SRC / package).rglob("*.py"):
            size = len(path.read_text().splitlines())
            assert size < 120, f"{path.relative_to(SRC)} has {size} lines; the code belongs into hora"


@pytest.mark.parametrize("module", ["hora", "hora.cli", "hora.world", "hora.launch", "horovod", "sparkdl"])
def test_import_needs_neither_torch_nor_pyspark(module):
    code = (
        f"import {module}, sys; print(sorted(m for m in ('torch', 'pyspark', 'numpy', 'pandas') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_environment_outside_world_and_config():
    for path in (SRC / "hora").rglob("*.py"):
        relative = path.relative_to(SRC / "hora")
        if relative.parts[0] not in ("engine", "torch") or relative.name == "nccl.py":
            continue  # NCCL takes some of its settings from the environment alone
        text = path.read_text()
        assert "os.environ" not in text, relative
        assert "getenv" not in text, relative
