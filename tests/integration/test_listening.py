"""Every listening socket of a job is in a table of docs/security.md, at the address that stands there."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from job_process import BIN, JobProcess
from test_agent_netns import NODES, nodes, started  # noqa: F401 - a fixture
from test_agent_netns import pytestmark as needs

from waiting import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
HORA = [str(BIN / "hora"), "run", "-np", "2"]
TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
RANK = """
import ctypes, pathlib, sys, time
import torch
if sys.argv[1] == "hvd":
    import horovod.torch as hvd
    hvd.init()
    hvd.allreduce(torch.ones(1))
    rank = hvd.rank()
elif sys.argv[1] == "mpi":
    library, found = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL), ctypes.c_int()
    assert library.MPI_Init(None, None) == 0
    library.MPI_Comm_rank(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(library, "ompi_mpi_comm_world"))),
                          ctypes.byref(found))
    rank = found.value
else:
    import torch.distributed as dist
    dist.init_process_group(sys.argv[1])
    dist.all_reduce(torch.ones(1))
    rank = dist.get_rank()
print("ready", rank, flush=True)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.05)
if sys.argv[1] == "mpi":
    library.MPI_Finalize()
"""
ALLOWED = range(20700, 20710)
LOOPBACK, OWN, EVERY = "loopback", "the host's own address", "every address"
# The command, its ranks' argument, its variables, and its ports: (process, where) -> rows of the tables.
Ports = dict[tuple[str, str], list[str]]
LOCAL: Ports = {("launcher", LOOPBACK): ["rendezvous"]}
MODES: dict[str, tuple[list[str], str, dict[str, str], Ports]] = {
    "one host": (HORA, "hvd", {}, LOCAL),
    "elastic": ([*HORA, "--min-np", "1"], "hvd", {}, LOCAL),
    "page": ([*HORA, "--dashboard"], "hvd", {}, {("launcher", LOOPBACK): ["rendezvous", "live page"]}),
    "sockets": (HORA, "hvd", {"HORA_TRANSPORT": "tcp"}, {**LOCAL, ("rank", LOOPBACK): ["control tree"]}),
    "groups of torch": (HORA, "hora", {}, LOCAL),
    "gloo": (HORA, "gloo", {"GLOO_SOCKET_IFNAME": "lo"}, {**LOCAL, ("rank", LOOPBACK): ["gloo"]}),
    "MPI world": (HORA, "hvd", {"HORA_MPI": "1"}, {**LOCAL, ("agent", LOOPBACK): ["PMIx"]}),
    "MPI": (
        HORA,
        "mpi",
        {"HORA_MPI": "1"},
        {**LOCAL, ("agent", LOOPBACK): ["PMIx"], ("rank", EVERY): ["Open MPI, MPICH"]},
    ),
    "torchrun": (
        TORCHRUN,
        "hvd",
        {},
        {("launcher", EVERY): ["torch's `TCPStore`"] * 2, ("rank", LOOPBACK): ["rendezvous of a foreign launcher"]},
    ),
}


def where(address: str) -> str:
    if address in ("0.0.0.0", "::"):
        return EVERY
    return LOOPBACK if address.startswith("127.") or address == "::1" else OWN


def ports_of(jobs: Iterable[JobProcess]) -> dict[tuple[str, str], set[tuple[int, int]]]:
    """Return processes and their ports, by the kind of process and of address."""
    found: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for job in jobs:
        for process in job.processes():
            line = " ".join(process.cmdline())
            kind = "agent" if "hora.launch.agent" in line else "rank" if "rank.py" in line else "launcher"
            kind = "launcher" if process.pid == job.process.pid else kind
            for address, port in listening(process.pid):
                found.setdefault((kind, where(address)), set()).add((process.pid, port))
    return found


def listening(pid: int) -> Iterator[tuple[str, int]]:
    """Yield the addresses at which a process listens, in its own network namespace."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(descriptor))
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for words in map(str.split, Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]):
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                address, port = words[1].split(":")
                packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in re.findall("." * 8, address))
                yield socket.inet_ntop(family, packed), int(port, 16)


def rows() -> set[str]:
    """Return the first cells of the tables of ports."""
    section = PAGE.partition("## What listens, and where")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| ([^|]+?) \|", section, re.M))


def check(jobs: list[JobProcess], expected: Ports) -> None:
    found = ports_of(jobs)
    assert set(found) == set(expected), "a port that no table has, or one that is no longer there"
    launchers = {key: len(ports) for key, ports in found.items() if key[0] == "launcher"}
    assert launchers == {key: len(names) for key, names in expected.items() if key[0] == "launcher"}
    assert {name for names in expected.values() for name in names} <= rows()


@pytest.mark.parametrize("mode", MODES)
def test_a_job_listens_where_the_tables_say(mode: str, tmp_path: Path):
    command, what, environment, expected = MODES[mode]
    if "MPI" in mode and ctypes.util.find_library("mpi") is None:
        pytest.skip("no Open MPI")
    finish, rank = tmp_path / "finish", tmp_path / "rank.py"
    rank.write_text(RANK)
    python = [] if command is TORCHRUN else [sys.executable]
    job = JobProcess([*command, *python, str(rank), what, str(finish)], tmp_path, **{"HORA_MPI": "0", **environment})
    for number in (0, 1):
        job.wait_for_text(f"ready {number}")
    check([job], expected)
    finish.touch()
    assert job.wait() == 0, job.text()


@pytest.mark.parametrize("mode", ["page", "sockets", "groups of torch", "torchrun"])
def test_a_job_listens_at_the_ports_that_the_user_allows(mode: str, tmp_path: Path):
    command, what, environment, expected = MODES[mode]
    finish, rank = tmp_path / "finish", tmp_path / "rank.py"
    rank.write_text(RANK)
    python = [] if command is TORCHRUN else [sys.executable]
    flags = ["--ports", f"{ALLOWED[0]}-{ALLOWED[-1]}"] if mode == "page" else []
    allowed = {} if flags else {"HORA_PORTS": f"{ALLOWED[0]}-{ALLOWED[-1]}"}
    argv = [*command, *flags, *python, str(rank), what, str(finish)]
    job = JobProcess(argv, tmp_path, **{"HORA_MPI": "0", **environment, **allowed})
    for number in (0, 1):
        job.wait_for_text(f"ready {number}")
    found = ports_of([job])
    assert set(found) == set(expected)
    ours = {
        port for (kind, _), ports in found.items() if command is not TORCHRUN or kind == "rank" for _, port in ports
    }
    assert ours
    assert ours <= set(ALLOWED)
    finish.touch()
    assert job.wait() == 0, job.text()


def test_a_rank_that_finds_no_free_port_says_where_and_what_to_do(tmp_path: Path):
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    with contextlib.ExitStack() as stack:
        for port in ALLOWED[1:]:  # the first is the rendezvous'
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        job = JobProcess(
            [*HORA, "--ports", f"{ALLOWED[0]}-{ALLOWED[-1]}", sys.executable, str(rank), "hvd", "-"],
            tmp_path,
            HORA_TRANSPORT="tcp",
        )
        assert job.wait() != 0
    said = f"all ports of HORA_PORTS={ALLOWED[0]}-{ALLOWED[-1]} are taken on {socket.gethostname()} (127.0.0.1)"
    assert said in job.text()


@pytest.mark.skipif(needs[1].args[0], reason=needs[1].kwargs["reason"])
def test_a_job_on_two_hosts_listens_at_the_ports_that_the_user_allows(nodes, tmp_path: Path):  # noqa: F811
    finish, rank = tmp_path / "finish", tmp_path / "rank.py"
    rank.write_text(RANK)
    program = f"exec {sys.executable} {rank} hvd {finish}"
    where = {"meet": "10.79.0.1", "HORA_PORTS": f"{ALLOWED[0]}-{ALLOWED[-1]}"}
    jobs = [started(nodes, node, tmp_path, program, **where) for node in range(len(NODES))]
    wait_until("both ranks are ready", lambda: sum(job.text().count("ready") for job in jobs) == 2, 150)
    found = ports_of(jobs)
    assert set(found) == {("launcher", OWN), ("rank", OWN)}
    assert {port for ports in found.values() for _, port in ports} <= set(ALLOWED)
    finish.touch()
    assert [job.wait() for job in jobs] == [0, 0], [job.text() for job in jobs]


@pytest.mark.skipif(needs[1].args[0], reason=needs[1].kwargs["reason"])
def test_a_job_on_two_hosts_listens_where_the_tables_say(nodes, tmp_path: Path):  # noqa: F811
    finish, rank = tmp_path / "finish", tmp_path / "rank.py"
    rank.write_text(RANK)
    jobs = [started(nodes, node, tmp_path, f"exec {sys.executable} {rank} hvd {finish}") for node in range(len(NODES))]
    wait_until("both ranks are ready", lambda: sum(job.text().count("ready") for job in jobs) == 2, 150)
    check(jobs, {("launcher", OWN): ["rendezvous", "nodes"], ("rank", OWN): ["control tree"]})
    finish.touch()
    assert [job.wait() for job in jobs] == [0, 0], [job.text() for job in jobs]
