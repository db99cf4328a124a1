"""docs/security.md lists attacks with their tests: all exist, and those from outside use public names only."""

from __future__ import annotations

import ast
import contextlib
import re
from pathlib import Path

import pytest
import torch

from hora.cli import doctor
from hora.engine import process
from hora.requirements import advisories

TESTS = Path(__file__).parents[1]
TABLE = (TESTS.parent / "docs" / "security.md").read_text().partition("| attack | tests")[2]
FROM_OUTSIDE = (
    "test_attacks_of_strangers.py",
    "test_attacks_of_users.py",
    "test_attacks_from_within.py",
    "test_attacks_on_stores.py",
    "attacked_jobs.py",
    "test_defects.py",
)
# The modules that users import; all other paths of the package may change.
PUBLIC = ("horovod", "sparkdl", "hora", "hora.workers", "hora.workflow", "hora.errors")
PACKAGES = ("horovod", "sparkdl", "hora")


def test_every_test_in_the_table_of_attacks_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)
    assert len(named) > 40
    missing = [
        f"{path}::{name}" for path, name in named if not re.search(rf"^def {name}\(", (TESTS / path).read_text(), re.M)
    ]
    assert missing == []


def test_every_attack_from_outside_is_in_the_table():
    for file in FROM_OUTSIDE:
        names = re.findall(r"^def (test_\w+)\(", (TESTS / "integration" / file).read_text(), re.M)
        assert [name for name in names if f"integration/{file}::{name}`" not in TABLE] == []


def test_attacks_from_outside_use_no_private_path():
    for file in FROM_OUTSIDE:
        text = (TESTS / "integration" / file).read_text()
        scripts = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        for source in (text, *(one for one in scripts if isinstance(one, str) and "import " in one)):
            paths = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", source, re.M)
            inside = [path for path in paths if path.split(".")[0] in PACKAGES]
            assert [
                path for path in inside if path not in PUBLIC and not path.startswith(("horovod.", "sparkdl."))
            ] == []


# Functions and classes that turn bytes into objects; some of them run code that the bytes name.
READERS = re.compile(
    r"(torch\.(?:serialization\.|jit\.|export\.|hub\.|distributed\.checkpoint\.)?load|torch\.package\.PackageImporter"
    r"|(?:_?pickle|cloudpickle|dill|marshal|joblib|shelve)\.(?:load|loads|open|Unpickler)|pandas\.read_pickle"
    r"|numpy\.load|yaml\.\w*load\w*|tarfile\.(?:open|TarFile)|zipfile\.ZipFile|shutil\.unpack_archive"
    r"|models\.load_model|load_torch|load_pickle)"
)


def _readers_in(text: str) -> set[str]:
    """Return the readers that a module calls, passes on or derives from, under any name."""
    tree = ast.parse(text)
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            origins |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            origins |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    used = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name))
    return {match[0] for name in used if (match := READERS.fullmatch(_origin(name, origins)))}


def _origin(name: str, origins: dict[str, str]) -> str:
    first, dot, rest = name.partition(".")
    name = (origins.get(first, first) + dot + rest).removeprefix("hora.safe_load.")
    return ".".join(name.split(".")[-2:]) if name.endswith(".load_model") else name


@pytest.mark.parametrize(
    ("text", "reader"),
    [
        ("import torch; torch.load(f)", "torch.load"),
        ("import torch as th; th.load(f)", "torch.load"),
        ("from torch import load; load(f)", "torch.load"),
        ("import torch.jit as jit; jit.load(f)", "torch.jit.load"),
        ("from torch import jit as j\ndef f(): j.load(f)", "torch.jit.load"),
        ("import pickle as p; p.loads(b)", "pickle.loads"),
        ("from pickle import Unpickler as U\nclass Mine(U): ...", "pickle.Unpickler"),
        ("import yaml; yaml.load(f, Loader)", "yaml.load"),
        ("from yaml import unsafe_load; unsafe_load(f)", "yaml.unsafe_load"),
        ("import tarfile; tarfile.open(f)", "tarfile.open"),
        ("from zipfile import ZipFile; ZipFile(f)", "zipfile.ZipFile"),
        ("import numpy as np; np.load(f)", "numpy.load"),
        ("import pandas as pd; pd.read_pickle(f)", "pandas.read_pickle"),
        ("from keras.models import load_model; load_model(f)", "models.load_model"),
        ("import shutil; shutil.unpack_archive(f)", "shutil.unpack_archive"),
    ],
)
def test_a_new_reader_of_bytes_is_found_under_any_name(text: str, reader: str):
    assert _readers_in(text) == {reader}


def test_every_reader_of_bytes_is_in_the_table_of_readers():
    """docs/security.md names the possible authors of each reader's bytes and the protection; no row is obsolete."""
    sources = TESTS.parent / "src"
    used = {
        (f"{path.relative_to(sources).parts[1]}: {path.stem}", reader)
        for path in sources.rglob("*.py")
        for reader in _readers_in(path.read_text())
    }
    page = (TESTS.parent / "docs" / "security.md").read_text()
    table = page.partition("| place | reader |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    told = {(row[0].strip("`"), reader.strip("` ")) for row in rows for reader in row[1].split(",")}
    assert told == used
    assert all(len(row) == 4 and row[2] and row[3] for row in rows)


@pytest.mark.parametrize(
    ("installed", "known"),
    [("2.3.1+cpu", 2), ("2.5.1", 2), ("2.6.0", 1), ("2.9.1+cu128", 1), ("2.10.0", 0), ("2.13.0", 0)],
)
def test_an_old_torch_is_named_with_its_advisories_and_rejected_in_strict_mode(installed, known, monkeypatch):
    found = advisories(installed)
    assert len(found) == known
    notes = list(doctor.torch_advisories(installed))
    assert len(notes) == bool(known)
    assert all(name in notes[0].text for name in found)
    monkeypatch.setattr(torch, "__version__", installed)
    process._refuse_vulnerable_torch()
    monkeypatch.setenv("HORA_STRICT", "1")
    with pytest.raises(ValueError, match=r"HORA_STRICT=1.*CVE-") if known else contextlib.nullcontext():
        process._refuse_vulnerable_torch()
