"""What users install is called hora-train: on the package index, hora is another project."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_OTHERS = re.compile(
    r"""pip[ ]install[^\n`]*?[ '"]hora(?=[\[ '"`\n]|$)  # pip install hora, 'hora[spark]'
    | \bhora\[[a-z]                                     # hora[spark] among requirements
    | metadata\.\w+\(["']hora["']                       # importlib.metadata.version("hora")
    | (?<![\w/])dist/hora-                              # the wheels' old names""",
    re.VERBOSE,
)

_TEXTS = ("", ".py", ".md", ".toml", ".yml", ".txt", ".ipynb", ".cpu", ".cuda")


def installs_another(text: str) -> list[str]:
    return [found[0] for found in _OTHERS.finditer(text)]


@pytest.mark.parametrize(
    "text", ["pip install hora", "pip install -U 'hora[spark]'", 'test = ["hora[spark]"]', 'metadata.version("hora")']
)
def test_the_old_form_is_found(text):
    assert installs_another(text)


@pytest.mark.parametrize("text", ["pip install hora-train", "pip install 'hora-train[spark]'", "dist/hora_train-1"])
def test_the_new_form_is_accepted(text):
    assert not installs_another(text)


def test_no_text_installs_another_project():
    folders = ("src", "docs", "examples", "benchmarks", "tests", "containers", "runtimes", ".github", "packaging")
    found = {}
    for path in itertools.chain(ROOT.glob("*"), *((ROOT / folder).rglob("*") for folder in folders)):
        if path.suffix in _TEXTS and path.is_file() and path != Path(__file__):
            lines = installs_another(path.read_text(errors="replace"))
            if lines:
                found[str(path)] = lines
    assert not found
