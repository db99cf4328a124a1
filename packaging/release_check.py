"""Rehearse a release: build what is published, install it where nothing else of Hora is, use it as a newcomer would.

    python packaging/release_check.py          # make release-check; ends with a table, and with 1 if a line failed

Everything happens in a temporary folder: a clone of the last commit, an environment with the pinned tools, and an empty
one into which only the wheel is installed, without a compiler on the PATH. pip's configuration is the machine's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900
# What the newcomer's PATH lacks.
COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "tcc", "c99", "x86_64-linux-gnu-gcc", "aarch64-linux-gnu-gcc")
DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("hora")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.ones(2, 4)).sum().backward()
print("ddp", dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
"""


class Rehearsal:
    """The folders of a rehearsal, and its steps in order."""

    def __init__(self, folder: Path) -> None:
        self.source, self.dist, self.user = folder / "hora", folder / "dist", folder / "user"
        self.tools, self.empty = folder / "tools", folder / "empty"
        self.user.mkdir()

    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("tools with hashes", self.install_tools),
            ("sdist and wheels", self.build),
            ("wheel for the other machine", self.build_for_another_machine),
            ("metadata", self.check_metadata),
            ("contents", self.check_contents),
            ("the sdist builds the same wheel", self.build_from_sdist),
            ("the wheel alone in an empty environment", self.install),
            ("hora doctor", lambda: self.typed("hora doctor", "All is well")),
            ("hora init", lambda: self.typed("hora init train.py && hora run -np 2 python train.py", "")),
            ("the README's script on two ranks", self.run_the_readme),
            ("DistributedDataParallel", lambda: self.typed("hora run -np 2 python ddp.py", "ddp 1 2")),
            ("the lab of the penguins", lambda: self.typed("hora demo penguins", "")),
            ("horovod's name", lambda: self.typed("pip check && python -c 'import horovod.torch'", "")),
        ]

    def install_tools(self) -> str:
        run([sys.executable, "-m", "venv", str(self.tools)])
        run([str(self.tools / "bin/pip"), "install", "-q", "--require-hashes", "-r", str(ROOT / "packaging/tools.txt")])
        run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(self.source)])
        installed = run([str(self.tools / "bin/pip"), "freeze"]).split()
        return ", ".join(line for line in installed if line.startswith(("hatchling", "twine")))

    def hatchling(self, folder: Path, out: Path, *targets: str, **env: str) -> None:
        options = [word for target in targets for word in ("-t", target)]
        command = [str(self.tools / "bin/python"), "-m", "hatchling", "build", "-d", str(out), *options]
        run(command, cwd=folder, env=os.environ | env)

    def build(self) -> str:
        self.hatchling(self.source, self.dist, "sdist", "wheel")
        self.hatchling(self.source, self.dist, "wheel", HORA_NATIVE="0")
        self.hatchling(self.source / "packaging/horovod", self.dist, "wheel")
        return ", ".join(sorted(path.name for path in self.dist.iterdir()))

    def build_for_another_machine(self) -> str:
        compiler = {"x86_64": "aarch64-linux-gnu-gcc", "aarch64": "x86_64-linux-gnu-gcc"}[os.uname().machine]
        if shutil.which(compiler) is None:
            return f"skipped: there is no {compiler}"
        self.hatchling(self.source, self.dist, "wheel", CC=compiler)
        assert len([*self.dist.glob("*manylinux*")]) == 2, [*self.dist.iterdir()]
        return compiler

    def check_metadata(self) -> str:
        command = [str(self.tools / "bin/twine"), "check", "--strict", *map(str, self.dist.iterdir())]
        return run(command).splitlines()[-1]

    def wheel(self) -> Path:
        (found,) = self.dist.glob(f"hora_train-*manylinux*{os.uname().machine}.whl")
        return found

    def check_contents(self) -> str:
        names = zipfile.ZipFile(self.wheel()).namelist()
        modules = {str(path.relative_to(self.source / "src")) for path in (self.source / "src").rglob("*.py")}
        assert modules <= set(names), modules - set(names)
        strange = [name for name in names if re.search(r"__pycache__|\.pyc$|^tests/|^benchmarks/", name)]
        assert not strange, strange
        assert any(name.endswith("/licenses/LICENSE") for name in names), "no licence"
        assert any(name.endswith(".so") for name in names), "no native part"
        return f"{len(names)} files, {self.wheel().stat().st_size >> 10} KiB"

    def build_from_sdist(self) -> str:
        unpacked = self.source.parent / "unpacked"
        (archive,) = self.dist.glob("hora_train-*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(unpacked, filter="data")
        (folder,) = unpacked.iterdir()
        again = self.source.parent / "again"
        self.hatchling(folder, again, "wheel")
        (built,) = again.iterdir()
        assert built.name == self.wheel().name, (built.name, self.wheel().name)
        one, other = zipfile.ZipFile(built), zipfile.ZipFile(self.wheel())
        differing = [name for name in other.namelist() if one.read(name) != other.read(name)]
        assert one.namelist() == other.namelist(), set(one.namelist()) ^ set(other.namelist())
        assert not differing, differing
        return built.name

    def install(self) -> str:
        venv.create(self.empty, with_pip=True)
        pip = [str(self.empty / "bin/pip"), "install", "-q", "-c", str(ROOT / "constraints.txt")]
        run([*pip, "torch"])
        (horovod,) = self.dist.glob("horovod-*.whl")
        run([*pip, f"{self.wheel()}[spark,examples]", str(horovod)])
        (self.user / "ddp.py").write_text(DDP)
        commands = self.user / "bin"
        commands.mkdir()
        for folder in ("/usr/bin", "/bin"):
            for path in Path(folder).iterdir():
                if path.name not in COMPILERS and not (commands / path.name).exists():
                    (commands / path.name).symlink_to(path)
        return self.typed("hora --version", "hora ")

    def typed(self, line: str, words: str) -> str:
        """Type a line in the newcomer's shell, and return the last line of its output, which contains `words`."""
        path = f"{self.empty / 'bin'}:{self.user / 'bin'}"
        kept = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "LANG") if name in os.environ}
        env = {"PATH": path, "MPLBACKEND": "Agg", **kept}
        printed = run(["bash", "-euc", line], cwd=self.user, env=env)
        assert words in printed, printed
        return printed.strip().splitlines()[-1][:100] if printed.strip() else ""

    def run_the_readme(self) -> str:
        blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
        script, function = blocks[:2]
        (self.user / "script.py").write_text(script)
        (self.user / "function.py").write_text(function.strip() + "\n")
        self.typed("horovodrun -np 2 python script.py", "2 ranks, loss")
        return self.typed("python function.py", "rank 0 of 2")


def run(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def main() -> int:
    rows = []
    with tempfile.TemporaryDirectory(prefix="hora-release-") as folder:
        for name, step in Rehearsal(Path(folder)).steps():
            began = time.monotonic()
            try:
                result, good = step(), True
            except Exception as error:  # the other steps still say something
                traceback.print_exception(error)
                result, good = str(error).strip().splitlines()[0][:100], False
            rows.append(f"{'ok' if good else 'FAILED':7} {time.monotonic() - began:6.1f} s  {name}: {result}")
            print(rows[-1], flush=True)
    failed = sum(row.startswith("FAILED") for row in rows)
    print(f"\n{len(rows) - failed} of {len(rows)} steps passed")
    return failed > 0


if __name__ == "__main__":
    raise SystemExit(main())
