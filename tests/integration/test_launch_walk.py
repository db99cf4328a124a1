"""Number of source files that a job passes: from the command line to the user's code, and in the death of a rank.

Every Python process of the job records in which files of Hora functions are called, and when. A file counts if one of
its functions is called between two moments. Calls made by imports do not count, so files of definitions are left out.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from job_process import BIN, JobProcess
from ssh_server import SSHD, SshServer

import hora
from waiting import wait_until

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(
        not (os.path.exists(SSHD) and shutil.which("ssh") and shutil.which("ssh-keygen")),
        reason="needs ssh, ssh-keygen and sshd (apt install openssh-server)",
    ),
]

MOST_FILES_TO_THE_USERS_CODE = 25
MOST_FILES_OF_A_DEATH = 18
ROOT = str(Path(hora.__file__).parent)

# Loaded by every Python process that reads the job's environment: appends "time file", once in 20 ms per file.
NOTES = f"""
import os, sys, threading, time
WALK_LOG = "WALK LOG"
_root, _seen = {ROOT!r}, set()
_log = os.open(WALK_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def _is_imported(frame):
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
def _note(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(_root):
        key = name, int(time.monotonic() * 50)
        if key not in _seen and not _is_imported(frame):
            _seen.add(key)
            os.write(_log, f"{{time.monotonic()}} {{name[len(_root) + 1:]}}\\n".encode())
threading.setprofile(_note)
sys.setprofile(_note)
"""

TRAIN = """
import os, sys, threading, time
sys.setprofile(None)
threading.setprofile(None)
open(os.environ["WALK_LOG"] + f".{os.getpid()}", "w").write(str(time.monotonic()))
import horovod.torch as hvd, torch
hvd.init()
print("ready", os.getpid(), flush=True)
@hvd.elastic.run
def train(state):
    if state.begun:
        print("goes on", time.monotonic(), flush=True)
        return
    state.begun = 1
    state.commit()
    while True:
        hvd.allreduce(torch.ones(1), name="step")
        time.sleep(0.02)
train(hvd.elastic.TorchState(begun=0))
"""


class Walk:
    """The recorded calls of a job."""

    def __init__(self, folder: Path) -> None:
        (folder / "site").mkdir()
        self._log = folder / "walk"
        (folder / "site" / "sitecustomize.py").write_text(NOTES.replace("WALK LOG", str(self._log)))
        self.env = {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self.env |= {"WALK_LOG": str(self._log)}

    def files(self, begin: float, end: float) -> set[str]:
        """Return the files in which functions were called between these moments."""
        notes = (line.split() for line in self._log.read_text().splitlines())
        return {name for moment, name in notes if begin <= float(moment) <= end}

    def reached(self) -> list[float]:
        """Return the time at which each rank reached the user's code."""
        return [float(path.read_text()) for path in self._log.parent.glob("walk.*") if path.read_text()]


def test_few_files_from_the_command_line_to_the_users_code(tmp_path):
    walk = Walk(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(TRAIN.partition("import horovod")[0])
    (tmp_path / "ssh").mkdir()
    with SshServer(tmp_path / "ssh", {"nodea": "127.0.0.1", "nodeb": "127.0.0.2"}) as server:
        (tmp_path / "job").mkdir()
        line = [str(BIN / "horovodrun"), "-np", "2", "-H", "nodea:1,nodeb:1", sys.executable, str(script)]
        job = JobProcess(line, tmp_path / "job", HORA_SSH=server.command, **walk.env)
        assert job.wait(150) == 0, job.text()
    reached = walk.reached()
    assert len(reached) == 2
    files = walk.files(0.0, max(reached))
    assert "cli/run.py" in files
    assert "launch/agent/agent.py" in files
    assert len(files) <= MOST_FILES_TO_THE_USERS_CODE, sorted(files)


def test_few_files_for_a_death_in_an_elastic_job(tmp_path):
    """Covers the launcher and the agent, from SIGKILL to the survivor's next generation."""
    walk = Walk(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    (tmp_path / "job").mkdir()
    line = [str(BIN / "horovodrun"), "-np", "2", "--min-np", "1", "--max-np", "2", "--blacklist-cooldown-range", "600"]
    job = JobProcess([*line, "601", sys.executable, str(script)], tmp_path / "job", **walk.env)
    wait_until("both ranks train", lambda: job.text().count("ready") == 2, 150)
    time.sleep(1.0)  # start-up is over; from here on only the death causes calls
    victim = int(job.text().split("ready ")[1].split()[0])
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    assert job.wait(150) == 0, job.text()
    end = float(job.text().split("goes on ")[1].split()[0])
    # The agent of this machine starts without site-packages and therefore records nothing.
    agents = {"launch/agent/agent.py", "launch/processes.py", "lifeline.py", "net/messages.py"}
    files = walk.files(begin, end) | agents
    assert "launch/controller/policy.py" in files
    assert len(files) <= MOST_FILES_OF_A_DEATH, sorted(files)
    assert not psutil.pid_exists(victim)
