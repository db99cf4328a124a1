"""An elastic job on two hosts, simulated by network namespaces, whose cable is cut and reconnected."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from elastic_job import ElasticJob
from ssh_server import SSHD, SshServer
from test_elastic_hosts import assert_equal, changes, stop_soon, wait_for_size

pytestmark = [
    pytest.mark.netns,
    pytest.mark.ssh,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "ssh", "ssh-keygen", SSHD))),
        reason="needs root, ip (iproute2), ssh, ssh-keygen and sshd",
    ),
]


class Machines:
    """Two hosts, `here` and `there`, joined by a cable; `there` runs sshd."""

    def __init__(self, folder: Path) -> None:
        self.here, self.there = f"hora-eh{os.getpid()}", f"hora-et{os.getpid()}"
        self._folder = folder

    def __enter__(self) -> Machines:
        for name, address in ((self.here, "10.78.0.1"), (self.there, "10.78.0.2")):
            self.ip(f"netns add {name}")
            self.ip(f"-n {name} link set lo up")
            if name == self.there:
                self.ip(f"link add cable netns {self.here} type veth peer name cable netns {self.there}")
                self.ip(f"-n {self.here} addr add 10.78.0.1/24 dev cable")
                self.ip(f"-n {name} addr add {address}/24 dev cable")
                self.ip(f"-n {self.here} link set cable up")
                self.ip(f"-n {name} link set cable up")
        self.server = SshServer(self._folder, {"there": "10.78.0.2"}, prefix=("ip", "netns", "exec", self.there))
        self.server.__enter__()
        return self

    def ip(self, command: str) -> None:
        done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False, timeout=30)
        if done.returncode != 0:
            pytest.skip(f"cannot make network namespaces: {done.stderr.strip()}")

    def __exit__(self, *_: object) -> None:
        self.server.__exit__()
        for name in (self.here, self.there):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=30)


@pytest.fixture
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("netns")) as made:
        yield made


@pytest.mark.slow
def test_training_continues_while_the_cable_is_cut_and_the_other_host_rejoins(machines: Machines, tmp_path: Path):
    job = ElasticJob(
        tmp_path,
        {"samples": 4000, "epochs": 1, "pause_s": 0.1},
        {"HORA_SSH": machines.server.command, "HORA_LAUNCHER_TIMEOUT": "10"},
        prefix=("ip", "netns", "exec", machines.here),
        num_proc=2,
        min_num_proc=1,
        hosts="10.78.0.1:1,there:1",
        network_interfaces=["cable"],
        cooldown_range=(1, 3),
        start_timeout=60,
    )
    wait_for_size(job, 2)
    machines.ip(f"-n {machines.there} link set cable down")
    wait_for_size(job, 1)
    machines.ip(f"-n {machines.there} link set cable up")
    wait_for_size(job, 2)
    stop_soon(job)
    results = job.results()
    assert_equal(results)
    assert changes(results[0]["sizes"]) == [2, 1, 2]


@pytest.mark.slow
def test_ranks_continue_while_they_cannot_reach_the_launcher(machines: Machines, tmp_path: Path):
    """The cable is cut for 20 s and ssh ends meanwhile. No rank is lost, and their output arrives afterwards."""
    job = ElasticJob(
        tmp_path,
        {"samples": 4000, "epochs": 1, "pause_s": 0.1, "per_step": True},
        {"HORA_SSH": machines.server.command},
        prefix=("ip", "netns", "exec", machines.here),
        num_proc=2,
        min_num_proc=2,
        host_discovery_script="echo there:2",
        network_interfaces=["cable"],
        start_timeout=60,
    )
    job.wait_for_step(3)
    ranks = [job.worker(number) for number in (0, 1)]
    machines.ip(f"-n {machines.there} link set cable down")
    cut_at = job.step()
    for process in job.processes():
        if process.name() == "ssh":
            process.kill()
    time.sleep(20)  # how long the cable is cut
    assert job.step() > cut_at + 10, "they did not train meanwhile"
    machines.ip(f"-n {machines.there} link set cable up")
    job.wait_for_step(job.step() + 20)
    assert [job.worker(number) for number in (0, 1)] == ranks
    assert all(psutil.pid_exists(pid) for pid in ranks)
    stop_soon(job)
    results = job.results()
    assert changes(results[0]["sizes"]) == [2]
    assert results[0]["starts"] == ["there/0", "there/1"]
