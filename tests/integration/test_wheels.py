"""The wheels: one with the native library for this machine, a universal one, and installation without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The source tree as checked out, without untracked files."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    names = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore")
    for path in (*ROOT.glob("hatch_*.py"), *(ROOT / name for name in names)):
        shutil.copy(path, folder / path.name)
    return folder


def built(tree, out, **env):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=tree, env={**os.environ, **env}, check=True, timeout=250, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return wheel, set(zipfile.ZipFile(wheel).namelist())


def test_a_native_wheel_supports_every_python_and_old_glibc(tree, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    wheel, names = built(tree, tmp_path / "out", HORA_NATIVE="1")
    assert re.fullmatch(r"hora_train-[^-]+-py3-none-manylinux_2_17_(x86_64|aarch64)\.whl", wheel.name)
    assert "hora/engine/shm/libhora.so" in names
    library = zipfile.ZipFile(wheel).read("hora/engine/shm/libhora.so")
    needed = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)}
    assert needed
    assert max(needed) <= (2, 17)
    assert not (tree / "src/hora/engine/shm/libhora.so").exists()


@pytest.mark.parametrize("env", [{"HORA_NATIVE": "0"}, {"CC": "no-such-compiler"}, {"CC": "false"}], ids=str)
def test_a_wheel_without_the_native_library_is_universal(tree, tmp_path, env):
    wheel, names = built(tree, tmp_path / "out", **({"HORA_NATIVE": "1"} | env))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names if name.endswith(".so")]
    assert "hora/engine/shm/native.py" in names


def test_the_version_is_that_of_the_tag_or_carries_the_commit(tmp_path):
    def version() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "import hatch_version; print(hatch_version.version())"]
        return subprocess.run(command, cwd=tmp_path, check=False, timeout=60, capture_output=True, text=True)

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, timeout=60, capture_output=True)

    source = (ROOT / "hatch_version.py").read_text()
    (tmp_path / "hatch_version.py").write_text(re.sub('VERSION = ".*"', 'VERSION = "1.2.3"', source))
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.3 - 2026-11-17\n\n## 1.2.2 - 2026-10-01\n")
    assert version().stdout == "1.2.3.dev0\n", "an image without git"
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    assert re.fullmatch(r"1\.2\.3\.dev1\+g[0-9a-f]+\n", version().stdout)
    git("tag", "v1.2.3")
    assert version().stdout == "1.2.3\n"
    git("commit", "--allow-empty", "-m", "two")
    assert re.fullmatch(r"1\.2\.3\.dev2\+g[0-9a-f]+\n", version().stdout)
    git("tag", "v1.3.0")
    assert "tag v1.3.0: VERSION in hatch_version.py is 1.2.3" in version().stderr
    git("tag", "-d", "v1.3.0")
    git("tag", "v1.2.3", "--force")
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n")
    assert "CHANGELOG.md has no section '## 1.2.3 - DATE'" in version().stderr
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: hora-train\nVersion: 1.2.3.dev7+gabc\n")
    assert version().stdout == "1.2.3.dev7+gabc\n", "a source archive"


def test_horovods_name_without_files(tmp_path):
    pytest.importorskip("hatchling")
    wheel, names = built(shutil.copytree(ROOT / "packaging" / "horovod", tmp_path / "horovod"), tmp_path / "out")
    assert wheel.name == "horovod-0.28.1+hora-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {"horovod-0.28.1+hora.dist-info"}
    metadata = zipfile.ZipFile(wheel).read("horovod-0.28.1+hora.dist-info/METADATA").decode()
    assert "Requires-Dist: hora-train\n" in metadata
