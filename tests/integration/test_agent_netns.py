"""Two nodes, played by network namespaces: the cable between them is cut, and both ends notice."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from job_process import BIN, JobProcess

from waiting import wait_until

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip (iproute2)"),
]
NODES = {f"hora-a{os.getpid()}": "10.79.0.1", f"hora-b{os.getpid()}": "10.79.0.2"}


def ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        pytest.skip(f"cannot make network namespaces: {done.stderr.strip()}")


@pytest.fixture
def nodes():
    first, second = NODES
    try:
        for name in NODES:
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"link add cable netns {first} type veth peer name cable netns {second}")
        for name, address in NODES.items():
            ip(f"-n {name} addr add {address}/24 dev cable")
            ip(f"-n {name} link set cable up")
        yield first, second
    finally:
        for name in NODES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=30)


def test_a_silent_node_is_given_up_and_ends_its_workers_by_itself(nodes, tmp_path):
    jobs = []
    for rank, name in enumerate(nodes):
        folder = tmp_path / str(rank)
        folder.mkdir()
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text("s" * 64)
        place = ["--nnodes", "2", "--node-rank", str(rank), "--meet", "10.79.0.1:29500", "--secret-file", str(secret)]
        line = [str(BIN / "hora"), "run", *place, "-np", "2", "--start-timeout", "120"]
        rank_command = ["sh", "-c", "echo I run; exec sleep 600"]
        jobs.append(JobProcess(["ip", "netns", "exec", name, *line, *rank_command], folder))
    wait_until("both ranks run", lambda: jobs[0].text().count("I run") == 2, 120)
    ip(f"-n {nodes[1]} link set cable down")
    assert [job.wait(150) for job in jobs] == [255, 1], jobs[0].text() + jobs[1].text()
    assert "ended unexpectedly" in jobs[0].text()
    assert "the first node, 10.79.0.1, is gone" in jobs[1].text()
    for job in jobs:
        job.assert_nothing_left(60)
