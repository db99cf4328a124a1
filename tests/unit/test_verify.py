"""The models of verify/ name the functions that they stand for; one that changes must be compared with its model.

Comments and white space do not count. `python tests/unit/test_verify.py` writes the present digests into the models,
once the models have been adapted and `make verify` passes.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = sorted((ROOT / "verify").glob("*.pml"))
_LINE = re.compile(r"^ \*     (src/hora/\S+\.(?:py|[ch])) ([\w.]+) ([0-9a-f]{10})$", re.M)


def text_of(path: str, name: str, source: str) -> str:
    """Return a function's text without comments and white space. KeyError: there is none of that name."""
    if path.endswith(".py"):
        return _python(name, source)
    bare = re.sub(r"/\*.*?\*/|//[^\n]*", " ", source, flags=re.S)
    found = re.search(rf"^(?:[a-z][\w ]*[ *])?{name}\([^;{{]*\) \{{(?:[^\n]*\}}$|.*?^\}})", bare, re.M | re.S)
    if found is None:
        raise KeyError(f"{path} has no function {name}")
    return " ".join(found[0].split())


def _python(name: str, source: str) -> str:
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        inside = [one for one in getattr(node, "body", []) if getattr(one, "name", None) == part]
        if not inside:
            raise KeyError(f"there is no {name}")
        node = inside[-1]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    lines = source.splitlines()[: node.end_lineno]
    if ast.get_docstring(node) is not None:
        del lines[node.body[0].lineno - 1 : node.body[0].end_lineno]
    return " ".join(re.sub(r"(^|\s)# .*$", "", "\n".join(lines[node.lineno - 1 :]), flags=re.M).split())


def digest_of(path: str, name: str) -> str:
    return hashlib.sha256(text_of(path, name, (ROOT / path).read_text()).encode()).hexdigest()[:10]


@pytest.mark.parametrize("model", MODELS, ids=[model.stem for model in MODELS])
def test_a_model_stands_for_the_functions_as_they_are(model: Path):
    named = _LINE.findall(model.read_text())
    assert len(named) >= 3, "the model names the functions that it stands for"
    assert any(path.endswith((".c", ".h")) for path, _, _ in named)
    changed = [f"{path}: {name}" for path, name, digest in named if digest_of(path, name) != digest]
    assert changed == [], (
        f"compare with verify/{model.name}, run `make verify`, then `python tests/unit/test_verify.py`"
    )


def test_the_head_of_a_model_names_files_that_exist():
    for model in MODELS:
        head = model.read_text().partition("#ifndef")[0]
        for path in re.findall(r"src/hora/[\w/]+\.\w+", head):
            assert (ROOT / path).exists(), f"{model.name} names {path}"


C = """
/* Publish. */
static int one(int a) { return a; }

void two(int a,
         int b) {
    if (a) {
        b++; /* why */
    }
}

int three(void) {
    return 3;
}
"""
PYTHON = 'class A:\n    def f(self):\n        """Say."""\n        return 1  # why\n\ndef f():\n    return 2\n'


@pytest.mark.parametrize(
    ("path", "name", "change", "counts"),
    [
        ("a.c", "two", lambda text: text.replace("/* why */", "// for another reason"), False),
        ("a.c", "two", lambda text: text.replace("    if", "        if"), False),
        ("a.c", "two", lambda text: text.replace("return", "goto"), False),
        ("a.c", "two", lambda text: text.replace("b++", "b--"), True),
        ("a.c", "two", lambda text: text.replace("int a,", "long a,"), True),
        ("a.c", "one", lambda text: text.replace("return a", "return -a"), True),
        ("a.c", "one", lambda text: text.replace("b++", "b--"), False),
        ("a.py", "A.f", lambda text: text.replace("why", "because").replace("Say", "Tell"), False),
        ("a.py", "A.f", lambda text: text.replace("return 2", "return 3"), False),
        ("a.py", "A.f", lambda text: text.replace("return 1", "return 3"), True),
        ("a.py", "f", lambda text: text.replace("return 2", "return 3"), True),
    ],
)
def test_a_change_of_a_function_is_noticed(path: str, name: str, change: Callable[[str], str], counts: bool):
    source = C if path == "a.c" else PYTHON
    changed = change(source)
    assert changed != source
    assert (text_of(path, name, changed) != text_of(path, name, source)) is counts


def test_a_function_that_is_gone_is_named():
    for path, source in (("a.c", C), ("a.py", PYTHON)):
        with pytest.raises(KeyError, match="four"):
            text_of(path, "four", source)


def _write() -> None:
    for model in MODELS:
        model.write_text(_LINE.sub(lambda m: f" *     {m[1]} {m[2]} {digest_of(m[1], m[2])}", model.read_text()))


if __name__ == "__main__":
    sys.exit(_write())
