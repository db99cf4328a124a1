"""Every snippet of the README and of docs/ runs.

`python` blocks of a page in order in one process, `sh` blocks one by one, and one that several pages have once.
`py` blocks are other products' code. The pages' processes are forked from one that has torch loaded.
"""

from __future__ import annotations

import atexit
import importlib.util
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW_PAGES = {"estimator.md"}
LIMIT_S = 300
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in _FENCE.findall(page.read_text()) if name == language]


@pytest.fixture
def playground(tmp_path: Path) -> Path:
    """A folder with the examples where pages expect them; what snippets write stays in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quick_to_start = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return {**os.environ, "PATH": path, "JAVA_TOOL_OPTIONS": quick_to_start}


def _be_page(where: str, environment: dict[str, str]) -> None:
    """In the page's process: as `python page.py`."""
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    with open("output", "wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    sys.path.insert(0, where)
    sys.argv[:] = ["page.py"]
    runpy.run_path("page.py", run_name="__main__")
    atexit._run_exitfuncs()  # multiprocessing's processes end without them


def _page(page: Path) -> ParameterSet:
    """Return the page as a parameter; those that train on several Sparks of their own are slow."""
    return pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW_PAGES else [])


@pytest.mark.parametrize("page", [_page(page) for page in PAGES if _blocks(page, "python")])
def test_python_blocks(page, playground):
    if page.name == "ray.md":
        pytest.importorskip("ray")
    if page.name == "tensorflow.md" and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow: make test-tensorflow")
    # as in a notebook: what a function of a page refers to travels with it
    (playground / "page.py").write_text("\n".join(_blocks(page, "python")))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "horovod.torch"])
    process = context.Process(target=_be_page, args=(str(playground), _environment()), daemon=False)
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    assert process.exitcode == 0, (playground / "output").read_text()


SHELL = list(dict.fromkeys(code for page in PAGES for code in _blocks(page, "sh")))


@pytest.mark.parametrize("code", SHELL, ids=lambda code: code.splitlines()[0][:60])
def test_shell_blocks(code, playground):
    done = subprocess.run(
        ["bash", "-euc", code],
        cwd=playground, env=_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_blocks_say_what_they_are():
    for page in PAGES:
        names = {name for name, _ in _FENCE.findall(page.read_text())}
        assert names <= {"", "python", "py", "sh", "console", "yaml", "json"}, page


def test_links_lead_somewhere():
    for page in [*PAGES, *sorted((ROOT / "docs").glob("*/*.md")), *sorted(ROOT.glob("*.md"))]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
