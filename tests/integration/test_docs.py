"""Runs every snippet of the README and of docs/.

Runs the `python` blocks of a page in order in one process, and each distinct `sh` block once. `py` blocks show code of
other products and are skipped. The pages' processes are forked from one that has loaded torch.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from hora.cli.dispatch import COMMANDS, LABS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW_PAGES = {"estimator.md", "spark_notebook.md"}
LAUNCHED = {"ddp_fsdp.md"}  # their scripts need a launcher, which the `sh` block starts
NEEDED = {"ray.md": "ray", "mlflow.md": "mlflow", "hyperparameters.md": "optuna"}  # packages that no extra brings
LIMIT_S = 300
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in _FENCE.findall(page.read_text()) if name == language]


@pytest.fixture
def playground(tmp_path: Path) -> Path:
    """A folder with the examples where pages expect them, which receives the snippets' output."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quick_to_start = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return {**os.environ, "PATH": path, "JAVA_TOOL_OPTIONS": quick_to_start}


def _be_page(where: str, environment: dict[str, str]) -> None:
    """Run the page in its process like `python page.py`."""
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    with open("output", "wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    sys.path.insert(0, where)
    sys.argv[:] = ["page.py"]
    runpy.run_path("page.py", run_name="__main__")
    atexit._run_exitfuncs()  # processes of multiprocessing exit without running them


def _page(page: Path) -> ParameterSet:
    """Return the page as a test parameter; pages that train on several Spark sessions are marked slow."""
    return pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW_PAGES else [])


@pytest.mark.parametrize(
    "page", [_page(page) for page in PAGES if _blocks(page, "python") and page.name not in LAUNCHED]
)
def test_python_blocks(page, playground):
    if page.name in NEEDED:
        pytest.importorskip(NEEDED[page.name], reason=f"{NEEDED[page.name]} is not installed")
    if page.name == "tensorflow.md" and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow: make test-tensorflow")
    # Functions of the page are pickled by value, as in a notebook.
    (playground / "page.py").write_text("\n".join(_blocks(page, "python")))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "horovod.torch"])
    process = context.Process(target=_be_page, args=(str(playground), _environment()), daemon=False)
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    assert process.exitcode == 0, (playground / "output").read_text()


def _shell_blocks() -> dict[str, str]:
    """Return each distinct `sh` block with the `python` block above it, which it expects as train.py."""
    found: dict[str, str] = {}
    for page in PAGES:
        script = ""
        for name, code in _FENCE.findall(page.read_text()):
            script = code if name == "python" else script
            if name == "sh":
                found.setdefault(code, script)
    return found


SHELL = _shell_blocks()


@pytest.mark.parametrize("code", SHELL, ids=lambda code: code.splitlines()[0][:60])
def test_shell_blocks(code, playground):
    if "hora init train.py" not in code:
        (playground / "train.py").write_text(SHELL[code])
    done = subprocess.run(
        ["bash", "-euc", code],
        cwd=playground, env=_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _printed_commands() -> dict[str, str]:
    """Return Hora's command lines that pages print but do not run (`bash` blocks, inline code), with their page."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = page.read_text()
        lines = [line for code in _blocks(page, "bash") for line in code.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", _FENCE.sub("", text))
        for line in lines:
            match = re.match(r"(?:\$ )?((?:hora|horovodrun) -?\w.*)", line.strip())
            if match and not re.search(r"…|\.\.\.|<", match[1]):
                found.setdefault(match[1].partition("  #")[0].strip(), page.name)
    return found


@pytest.mark.parametrize(("line", "page"), _printed_commands().items(), ids=lambda value: value[:60])
def test_printed_commands_exist_with_their_options(line, page):
    """Commands that need hosts or clusters cannot run here, so only their options are parsed."""
    program, *words = shlex.split(line)
    if program == "hora" and words[0].startswith("-"):
        assert words[0] in ("--help", "--version", "--check-build", "-h", "-v", "-cb"), page
        return
    name, rest = ("run", words) if program == "horovodrun" else (words[0], words[1:])
    assert name in COMMANDS, page
    if name == "demo" and rest:
        parser = LABS[rest[0]].make_parser()
        rest = rest[1:]
    else:
        parser = COMMANDS[name].make_parser()
    if parser is None or not rest or {"--help", "--help-all"} & set(rest):
        return
    known = {flag: action for action in _actions(parser) for flag in action.option_strings}
    ends_at_command = name in ("run", "plan")  # the rest belongs to another program
    waiting = iter(rest)
    for word in waiting:
        if word.startswith("-") and word != "--":
            flag, equals, _ = word.partition("=")
            assert flag in known, f"{page}: {line}: there is no {word}"
            if known[flag].nargs != 0 and not equals:
                next(waiting, None)  # its value
        elif ends_at_command or word == "--":
            return


def _actions(parser):
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _actions(child)


def test_copied_commands_have_no_prompt():
    for page in PAGES:
        for language, code in _FENCE.findall(page.read_text()):
            assert not re.search(r"^\s*\$ ", code, re.MULTILINE), f"{page}: {language}: {code[:80]}"


def test_every_block_names_its_language():
    for page in PAGES:
        names = {name for name, _ in _FENCE.findall(page.read_text())}
        assert names <= {"", "python", "py", "sh", "bash", "text", "yaml", "json"}, page


def test_link_targets_exist():
    for page in [*PAGES, *sorted((ROOT / "docs").glob("*/*.md")), *sorted(ROOT.glob("*.md"))]:
        for target in re.findall(r"\]\((?!http|\.\./\.\./actions/)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
