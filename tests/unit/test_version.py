"""The oldest supported versions of other packages: one list, matching metadata, and an error with the remedy."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from hora.requirements import FLOORS, missing_extra, require, require_gil, too_old

ROOT = Path(__file__).parents[2]


def test_the_packages_metadata_has_the_same_minimum_versions():
    declared = dict(re.findall(r'"([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))
    assert {name: declared[name] for name in FLOORS} == FLOORS


@pytest.mark.parametrize("found", ["2.3.0", "2.3.1+cpu", "2.10.0a0+git1234", "2.13.0+cu128", "3.0"])
def test_a_version_at_or_above_the_minimum_is_accepted(found):
    assert not too_old("torch", found)
    require("torch", found)


@pytest.mark.parametrize("found", ["1.13.1", "2.2.2+cu121", "2.0"])
def test_a_version_below_the_minimum_names_the_remedy(found):
    with pytest.raises(ImportError, match=rf"torch {re.escape(found)} is too old .* pip install 'torch>=2\.3'"):
        require("torch", found)


def test_a_feature_may_need_a_newer_version():
    require("torch", "2.7.1", feature="x", floor="2.7")
    with pytest.raises(ImportError, match=r"torch 2\.6\.0 is too old for x, which needs 2\.7 or newer"):
        require("torch", "2.6.0", feature="x", floor="2.7")


def test_a_free_threaded_python_is_rejected_with_the_remedy(monkeypatch):
    require_gil()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(RuntimeError, match="PYTHON_GIL=1"):
        require_gil()


@pytest.mark.parametrize(("module", "package"), [("horovod.tensorflow", "tensorflow"), ("horovod.keras", "keras")])
def test_an_import_without_its_extra_names_the_extra(module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    words = rf"{module} needs {package}: .*pip install 'hora-train\[tensorflow\]'"
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module(module)


def test_another_missing_module_is_not_mistaken_for_an_extra():
    with pytest.raises(ModuleNotFoundError, match="No module named 'mine'"):
        missing_extra(ModuleNotFoundError("No module named 'mine'", name="mine"), "horovod.keras", "tensorflow")
