"""Runs the README's installation and first snippets verbatim: in a fresh clone and virtual environment, as a user
without privileges and without Java.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534
LIMIT_S = 900
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.skipif(
    subprocess.run(["/usr/bin/python3", "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode
    != 0,
    reason="needs a python3 with venv for every user (python3-venv)",
)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone of the repository")
def test_the_commands_of_the_readme_verbatim():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        _type_the_readme(Path(folder))


def _type_the_readme(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    clone = home / "hora"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    (clone / "README.md").write_text((ROOT / "README.md").read_text())
    install = "\n".join(line.partition(" # ")[0] for line in _blocks("bash")[0].splitlines())
    script, function = _blocks("python")[:2]
    (clone / "script.py").write_text(script)
    (clone / "function.py").write_text(f"{function.strip()}\n")
    typed = "\n".join([install, "python script.py", _blocks("sh")[0], "python function.py"])
    commands = home / "bin"  # all commands of this machine except Java
    commands.mkdir()
    for command in Path("/usr/bin").iterdir():
        if not command.name.startswith("java"):
            (commands / command.name).symlink_to(command)
    settings = Path.home() / ".config" / "pip"
    if settings.is_dir():
        shutil.copytree(settings, home / ".config" / "pip")
    subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(home)], check=True)
    own = (
        "PIP_",
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "no_proxy",
        "SSL_",
        "REQUESTS_",
    )
    env = {name: value for name, value in os.environ.items() if name.startswith(own)}
    env |= {"HOME": str(home), "PATH": str(commands), "LANG": "C.UTF-8"}
    done = subprocess.run(
        ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "bash", "-euc", typed],
        cwd=clone, env=env, text=True, capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "1 ranks, loss" in done.stdout
    assert "rank 0 of 2, learning rate 0.2" in done.stdout
