"""Package layering: allowed imports, no cycles, and few modules that access the environment."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
HORA = SRC / "hora"
BASE = {
    *("errors", "world", "config", "events", "files", "lifeline", "logs", "memory", "safe_load"),
    *("version", "requirements", "foreign_horovod", "spelling", "platforms", "tracebacks"),
}
# The packages that a package may import besides itself and the base. Lazy imports count as any other.
MAY_IMPORT: dict[str, set[str]] = {
    "net": set(),
    "telemetry": set(),
    "watch": {"net", "telemetry"},
    "engine": {"net", "telemetry"},
    "torch": {"engine", "telemetry", "torch_backend"},
    "torch_backend": {"engine", "torch"},
    "elastic": {"torch"},
    "tensorflow": {"engine", "net", "telemetry", "torch"},
    "keras": {"telemetry", "tensorflow", "torch"},
    "launch": {"net", "telemetry", "watch"},
    "workers": {"launch", "net"},
    "data": set(),
    "spark": {"torch", "keras", "data", "workflow", "launch", "net", "telemetry"},
    "ray": {"launch", "net", "legacy"},
    "workflow": {"telemetry", "torch"},
    "labs": {"elastic", "keras", "launch", "telemetry", "torch", "workflow"},
    "legacy": {"engine", "torch", "launch", "net"},
    "compat": {"workers", "launch"},
    "decorator": {"launch", "spark", "ray"},
    "cli": {"watch", "launch", "workers", "labs", "legacy", "net"},
    "__init__": {"decorator", "launch", "telemetry", "torch"},
    "__main__": {"cli"},
}
# The modules that read and write the environment; all others receive values.
OWNERS_OF_THE_ENVIRONMENT = {
    "hora.config",
    "hora.legacy.env",
    "hora.launch.environment",
    "hora.torch_backend",
    "hora.platforms.detect",
}


def _name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _modules() -> dict[str, Path]:
    return {_name(path): path for path in sorted(HORA.rglob("*.py"))}


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@cache
def _imports(module: str) -> frozenset[str]:
    """Return the modules of this package that `module` imports: at its top, in functions, for types, by name."""
    found = set()
    for node in ast.walk(ast.parse(_modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in _modules() else str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            assert not name.startswith("horovod"), f"{module} imports the old name {name}"
            found.add(name)
    return frozenset(found & _modules().keys() - {module})


def test_every_package_has_a_rule():
    assert {_room(module) for module in _modules()} == set(MAY_IMPORT) | BASE


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_imports_follow_the_rules(room):
    allowed = MAY_IMPORT[room] | BASE | {room}
    for module in _modules():
        if _room(module) == room:
            wrong = sorted(name for name in _imports(module) if _room(name) not in allowed)
            assert not wrong, f"{module} imports {wrong}"


def test_the_base_imports_only_the_base():
    for module in _modules():
        if _room(module) in BASE:
            assert {_room(found) for found in _imports(module)} <= BASE


def test_no_import_cycles_even_through_lazy_imports():
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for name in sorted(_imports(module)):
                visit(name, (*way, module))
            done.add(module)

    for module in _modules():
        visit(module, ())


def _touches_environment(module: str) -> bool:
    for node in ast.walk(ast.parse(_modules()[module].read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv"):
            return True
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {"environ", "getenv"} & {a.name for a in node.names}
        ):
            return True
    return False


def test_only_the_owners_access_the_environment():
    found = {module for module in _modules() if _touches_environment(module)}
    assert found == OWNERS_OF_THE_ENVIRONMENT


def test_old_names_only_re_export():
    for package in ("horovod", "sparkdl"):
        for path in (SRC / package).rglob("*.py"):
            if path.name == "_modules.py":
                continue  # the table
            size = len(path.read_text().splitlines())
            assert size < 120, f"{path.relative_to(SRC)} has {size} lines; the code belongs into hora"


def test_the_tree_in_architecture_md_is_complete():
    """Every module is named in the lines of its package, and the tree shows no other packages."""
    tree = (SRC.parent / "ARCHITECTURE.md").read_text().partition("\nsrc/hora/\n")[2].partition("\nsrc/horovod/")[0]
    words: dict[str, set[str]] = {"": set()}
    rooms: list[str] = []
    for line in tree.splitlines():
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        if name.endswith("/") and indent < 10:
            rooms = [*rooms[: indent // 2 - 1], name.rstrip("/")]
        elif indent < 10:
            rooms = []
        words.setdefault("/".join(rooms), set()).update(re.findall(r"\w+", line))
    folders = {path.parent.relative_to(HORA).as_posix() for path in _modules().values()} - {"."}
    assert set(words) - {""} == folders
    for path in _modules().values():
        room = path.parent.relative_to(HORA).as_posix().removeprefix(".")
        assert path.stem.startswith("__") or path.stem in words[room], (
            f"{path.relative_to(HORA)} is not in ARCHITECTURE.md"
        )


def test_no_two_test_files_share_a_name():
    """pytest imports test files by their base names, so a run of all of them would fail at once."""
    names = [
        path.name for path in (SRC.parent / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")
    ]
    assert sorted(names) == sorted(set(names))
