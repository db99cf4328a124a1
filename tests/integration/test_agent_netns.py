"""Traffic between two nodes, simulated by network namespaces, and the loss of the cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from job_process import BIN, JobProcess

from waiting import wait_until

pytestmark = [
    pytest.mark.netns,
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


SNIFFER = """
import socket, sys, threading
stop = threading.Event()
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sniffer:
    sniffer.bind(("cable", 0))
    sniffer.settimeout(0.2)
    print("running", flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set())).start()
    while not stop.is_set():
        try:
            sys.stdout.buffer.write(sniffer.recv(2**17))
        except TimeoutError:
            pass
"""
LINE = "what a rank prints"


@pytest.mark.parametrize("encrypt", ["auto", "never"])
def test_control_messages_between_nodes_cannot_be_read(nodes, tmp_path, encrypt):
    """Covers the environment given to a rank and its output, for every setting of HORA_ENCRYPT."""
    sniffer = subprocess.Popen(
        ["ip", "netns", "exec", nodes[0], sys.executable, "-c", SNIFFER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert sniffer.stdout.readline() == b"running\n"
        jobs = [started(nodes, rank, tmp_path, f"echo {LINE}", HORA_ENCRYPT=encrypt) for rank in (0, 1)]
        assert [job.wait(150) for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
        recorded, _ = sniffer.communicate(timeout=30)
    finally:
        sniffer.kill()
        sniffer.wait(30)
    assert jobs[0].text().count(LINE) == 2
    assert len(recorded) > 1000
    readable = [text for text in (LINE, "HOROVOD_LOCAL_RANK", "HORA_JOB") if text.encode() in recorded]
    assert b"HORA/4" in recorded
    assert not readable


def started(nodes, rank, folder, command, meet="10.79.0.1:29500", **environment):
    """Start one of two nodes, with one rank that runs this command."""
    own = folder / str(rank)
    own.mkdir()
    secret = own / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s" * 64)
    place = ["--nnodes", "2", "--node-rank", str(rank), "--meet", meet, "--secret-file", str(secret)]
    line = [str(BIN / "hora"), "run", *place, "-np", "2", "--start-timeout", "120", "sh", "-c", command]
    return JobProcess(["ip", "netns", "exec", nodes[rank], *line], own, **environment)


@pytest.mark.slow
def test_an_unreachable_node_is_dropped_and_ends_its_own_workers(nodes, tmp_path):
    jobs = [started(nodes, rank, tmp_path, "echo I run; exec sleep 600") for rank in (0, 1)]
    wait_until("both ranks run", lambda: jobs[0].text().count("I run") == 2, 120)
    ip(f"-n {nodes[1]} link set cable down")
    assert [job.wait(150) for job in jobs] == [255, 1], jobs[0].text() + jobs[1].text()
    assert "ended unexpectedly" in jobs[0].text()
    assert "the first node, 10.79.0.1, is gone" in jobs[1].text()
    for job in jobs:
        job.assert_nothing_left(60)
