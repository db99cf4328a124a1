"""A real Slurm cluster for tests: one slurmctld, two slurmd on this machine, and a munged with its own key. All of it
is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch")
_LIMIT_S = 120.0


def missing() -> str:
    """Return the reason why no cluster can run here, or an empty string."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class SlurmCluster:
    """Nodes n1 and n2 with two cores and two dummy GPU devices each.

    `environment`: for Slurm's commands.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        here = self.folder
        key = here / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        for name in ("state", "spool-n1", "spool-n2"):
            (here / name).mkdir()
        for number in (0, 1):
            os.mknod(here / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # like /dev/null
        (here / "gres.conf").write_text(f"NodeName=n1,n2 Name=gpu Flags=nvidia_gpu_env File={here}/gpu[0-1]\n")
        (here / "slurm.conf").write_text(self._config())
        files = [f"--{kind}-file={here}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        self._run("munged", "--foreground", "--force", f"--socket={here}/munge.socket", *files)
        wait_until("munged listens", (here / "munge.socket").exists, _LIMIT_S)
        self._run("slurmctld", "-D", "-f", str(here / "slurm.conf"))
        for name in ("n1", "n2"):
            self._run("slurmd", "-D", "-N", name, "-f", str(here / "slurm.conf"))
        wait_until("both nodes are idle", lambda: self.command("sinfo", "-h", "-o", "%D %t") == "2 idle\n", _LIMIT_S)

    def _config(self) -> str:
        here, name = self.folder, socket.gethostname().partition(".")[0]
        settings: dict[str, Any] = {
            "ClusterName": "hora",
            "SlurmctldHost": f"{name}(127.0.0.1)",
            "SlurmctldPort": _free_port(),
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={here}/munge.socket,cred_expire=30",  # also the time a requeued job must wait
            "SlurmUser": "root",
            "StateSaveLocation": here / "state",
            "SlurmdSpoolDir": f"{here}/spool-%n",
            "SlurmctldPidFile": here / "slurmctld.pid",
            "SlurmdPidFile": f"{here}/slurmd-%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "GresTypes": "gpu",
            "SchedulerParameters": "bf_interval=1",  # only the backfill scheduler starts heterogeneous jobs
            "MpiDefault": "none",
            "ReturnToService": 2,
            "KillWait": 10,
            "MailProg": "/bin/true",
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        lines += [
            f"NodeName={node} NodeHostname={name} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=2 RealMemory=1000 "
            "Gres=gpu:2"
            for node in ("n1", "n2")
        ]
        return "\n".join([*lines, "PartitionName=all Nodes=n1,n2 Default=YES State=UP", ""])

    def _run(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.{len(self._processes)}.out").open("wb") as log:
            program = _program(name)
            assert program is not None
            self._processes.append(
                subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def command(self, *argv: str) -> str:
        """Run one of Slurm's commands and return its output."""
        env = os.environ | self.environment
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False).stdout

    def wait_until_free(self) -> None:
        """Wait until no job holds a node."""
        wait_until("all of Slurm's nodes are free", lambda: self.command("squeue", "-h") == "", _LIMIT_S)
        wait_until("both nodes are idle", lambda: self.command("sinfo", "-h", "-o", "%D %t") == "2 idle\n", _LIMIT_S)

    def __exit__(self, *_: object) -> None:
        if len(self._processes) == 4:
            self.command("scancel", "--user=root")
            with suppress(AssertionError):  # a failed test's job: its steps must end before the daemons
                self.wait_until_free()
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
