"""Attacks on users who start jobs: modules planted in the folder, and workers that send forged exceptions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
PLANTED = ["cloudpickle", "torch", "numpy", "runpy", "json", "hora", "horovod", "yaml", "socket"]
DRIVER = """
import horovod, sys
from sparkdl import HorovodRunner

def main():
    return "result of rank 0"

if __name__ == "__main__":
    print(horovod.run(main, num_proc=2), HorovodRunner(np=-2).run(main))
"""
FROM_THERE = """
import planted_by_its_owner

def main():
    import planted_by_its_owner
    return planted_by_its_owner.VALUE

if __name__ == "__main__":
    import horovod
    print(horovod.run(main, num_proc=2))
"""


# A command's worker that holds the job's secret and reports an exception and a result that execute code when they are
# unpickled.
LIAR = """
import pickle, sys
from hora.net.client import ControlClient
from hora.platforms.detect import detect_world
from hora.world import World

class Exploit:
    def __reduce__(self):
        return exec, (f"open({sys.argv[1]!r}, 'w').write('executed in the launcher')",)

world = detect_world()
client = ControlClient.connect(world.rendezvous, name="x", worker=world.worker, timeout_s=60)
client.send_error(type_name="X", message="m", traceback="t", consequence=False, pickled=pickle.dumps(Exploit()))
client.send_result(pickle.dumps(Exploit()))
sys.exit(3)
"""


@pytest.mark.parametrize(
    "command", [[str(BIN / "horovodrun")], [str(BIN / "hora"), "run"]], ids=["horovodrun", "hora run"]
)
def test_a_worker_of_a_command_executes_nothing_in_the_launcher(tmp_path: Path, command: list[str]):
    (tmp_path / "liar.py").write_text(LIAR)
    trap = tmp_path / "executed"
    done = subprocess.run(
        [*command, "-np", "2", sys.executable, "liar.py", str(trap)],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert not trap.exists()
    assert done.returncode != 0
    assert re.search("(?i)exit code:? 3", done.stdout + done.stderr)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder with modules planted by another user, which record that they were imported."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write({name + ' '!r})\nraise ImportError\n"
        )
    return folder


def started_there(shared: Path, *argv: str) -> str:
    done = subprocess.run(argv, cwd=shared, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    executed = shared.parent / "executed"
    assert not executed.exists(), f"imported from the current folder: {executed.read_text()}"
    return done.stdout


def test_a_program_of_the_users_own(shared: Path, tmp_path: Path):
    (tmp_path / "driver.py").write_text(DRIVER)
    assert "result of rank 0" in started_there(shared, sys.executable, str(tmp_path / "driver.py"))


@pytest.mark.parametrize("command", [["doctor"], ["--check-build"]], ids=" ".join)
def test_commands_that_look_at_the_machine(shared: Path, command: list[str]):
    assert started_there(shared, str(BIN / "hora"), *command)


def test_workers_sessions(shared: Path):
    """The worker's own code may import from the folder; the session and the worker around it must not."""
    hora = str(BIN / "hora")
    try:
        started_there(shared, hora, "workers", "launch", "--cpu", "0.5", "--memory", "1", "--code", "print(1)")
    finally:
        subprocess.run([hora, "workers", "end"], cwd=shared, check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_modules_beside_the_users_own_script_are_found(tmp_path: Path):
    (tmp_path / "planted_by_its_owner.py").write_text("VALUE = 42\n")
    (tmp_path / "driver.py").write_text(FROM_THERE)
    done = subprocess.run(
        [sys.executable, "driver.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.stdout == "[42, 42]\n", done.stderr


def test_modules_of_the_current_folder_are_found_where_the_caller_finds_them(tmp_path: Path):
    """A notebook or a prompt imports from the folder it was started in, and so do its ranks."""
    (tmp_path / "planted_by_its_owner.py").write_text("VALUE = 42\n")
    code = "import horovod, planted_by_its_owner as p\nprint(horovod.run(lambda: p.VALUE, num_proc=2))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.stdout == "[42, 42]\n", done.stderr
