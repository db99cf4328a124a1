"""Builds the images of containers/ on a freshly made Debian base and runs doctor and a two-rank training in each.

`make test-containers`: takes minutes and gigabytes; needs root, buildah and mmdebstrap. pip inside the builds uses this
machine's pip configuration; folders that it names are mounted at the same paths.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = "python3,python3-venv,ca-certificates,procps"
pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Buildah:
    """buildah with its own storage, which is removed afterwards."""

    folder: Path

    def __call__(self, command: str, *arguments: str, timeout_s: float = 1500) -> str:
        storage = ["--root", str(self.folder / "root"), "--runroot", str(self.folder / "run")]
        argv = ["buildah", *storage, command, *arguments]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout.strip()

    def run(self, container: str, *command: str) -> str:
        return self("run", "--isolation", "chroot", container, "--", *command)


def pip_settings() -> dict[str, str]:
    """Return this machine's pip configuration, by option name."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"^\S+?\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    return {name: value for name, value in found if name in ("cert", "extra-index-url", "find-links", "index-url")}


def mounts() -> list[str]:
    """Return the flags that mount the files and folders named by pip's configuration."""
    words = " ".join(pip_settings().values()).replace("file://", "").split()
    folders = {Path(word) for word in words if word.startswith("/")}
    # A package index is a folder beside the files that it links to.
    places = {path.parent if path.name == "simple" else path for path in folders if path.exists()}
    return [word for path in sorted(places) for word in ("--volume", f"{path}:{path}:ro")]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a Debian base")
    folder = tmp_path_factory.mktemp("containers")
    tool = Buildah(folder)
    tar = folder / "base.tar"
    made = subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(tar)],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip(f"mmdebstrap made no Debian base: {made.stderr.strip().splitlines()[-1]}")
    container = tool("from", "scratch")
    tool("add", container, str(tar), "/")
    variables = {"PATH": "/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    # Set in the base: `buildah build --env` reaches the image, but not the RUN steps of every version.
    variables |= {f"PIP_{name.upper().replace('-', '_')}": value for name, value in pip_settings().items()}
    tool("config", *(f"--env={name}={value}" for name, value in variables.items()), container)
    # Debian's Python refuses `pip install`, unlike that of python.org's image, so use a virtual environment.
    tool("run", "--isolation", "chroot", container, "--", "python3", "-m", "venv", "/venv")
    tool("commit", "--rm", container, "base")
    tar.unlink()
    yield tool
    tool("rm", "--all")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_image_trains_on_two_ranks(kind, buildah):
    index = pip_settings().get("index-url", "https://pypi.org/simple")
    build = ["--build-arg", "BASE=localhost/base"]
    if kind == "cpu":
        build += ["--build-arg=JAVA=", "--build-arg=EXTRAS=examples", f"--build-arg=TORCH_INDEX={index}"]
    file = f"containers/Dockerfile.{kind}"
    buildah("build", "--isolation", "chroot", *mounts(), *build, "--file", file, "--tag", kind, ".")
    container = buildah("from", f"localhost/{kind}")
    try:
        found = buildah.run(container, "hora", "doctor")
        assert "an allreduce was tried and works" in found, found
        assert "All is well." in found, found
        demo = "hora demo penguins --no-spark --np 2 --epochs 5 --out /tmp/penguins"
        trained = buildah.run(container, *demo.split())
        assert re.search(r"\[0\]<stdout>:epoch +5/5", trained), trained[-2000:]
    finally:
        buildah("rm", container)
        buildah("rmi", "--force", f"localhost/{kind}")
