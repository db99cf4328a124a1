"""Every snippet of the README and of docs/ runs.

`python` blocks of a page in order in one process, `sh` blocks one by one, and one that several pages have once.
`py` blocks are other products' code.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW_PAGES = {"estimator.md"}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in _FENCE.findall(page.read_text()) if name == language]


@pytest.fixture
def playground(tmp_path: Path) -> Path:
    """A folder with the examples where pages expect them; what snippets write stays in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def _run(argv: list[str], where: Path) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    env["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # quick to start
    done = subprocess.run(argv, cwd=where, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _page(page: Path) -> ParameterSet:
    """Return the page as a parameter; those that train on several Sparks of their own are slow."""
    return pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW_PAGES else [])


@pytest.mark.parametrize("page", [_page(page) for page in PAGES if _blocks(page, "python")])
def test_python_blocks(page, playground):
    if page.name == "ray.md":
        pytest.importorskip("ray")
    if page.name == "tensorflow.md" and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow: make test-tensorflow")
    script = playground / "page.py"
    # as in a notebook: what a function of a page refers to travels with it
    script.write_text("\n".join(_blocks(page, "python")))
    _run([sys.executable, str(script)], playground)


SHELL = list(dict.fromkeys(code for page in PAGES for code in _blocks(page, "sh")))


@pytest.mark.parametrize("code", SHELL, ids=lambda code: code.splitlines()[0][:60])
def test_shell_blocks(code, playground):
    _run(["bash", "-euc", code], playground)


def test_blocks_say_what_they_are():
    for page in PAGES:
        names = {name for name, _ in _FENCE.findall(page.read_text())}
        assert names <= {"", "python", "py", "sh", "console", "yaml", "json"}, page


def test_links_lead_somewhere():
    for page in [*PAGES, *sorted((ROOT / "docs").glob("*/*.md")), *sorted(ROOT.glob("*.md"))]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
