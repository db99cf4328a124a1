"""Nodes that join a job: their rank, admission, and time limits. No process is started."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest

from hora.errors import StartTimeoutError
from hora.launch.agent.protocol import MESSAGES, Join, Output, Refused, Welcome
from hora.launch.agent.session import join
from hora.launch.controller.agents import Agents, credentials
from hora.launch.options import Options
from hora.launch.providers.join import find_place
from hora.launch.providers.slurm import allocation
from hora.launch.slots import HostInfo
from hora.net.messages import pack, unpack
from hora.net.session import ClientSession
from hora.net.wire import connect, new_secret
from hora.platforms.node import Node
from hora.version import version
from waiting import wait_until

MACHINE = "node7.cluster"
SECRET = new_secret()
JOIN = Join(1, "b", 2, version(), [], [])

KUBEFLOW = {
    "PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}  # fmt: skip
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9", "SKYPILOT_TASK_ID": "sky-1",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "tux[01-03]", "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "tux02", "SLURM_GPUS_ON_NODE": "4",
}  # fmt: skip
LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "login1 1 node3 4 node7 4"}
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (KUBEFLOW, (3, 2, 4, "job-node-0-0.job", 29500)),
        (
            {**KUBEFLOW, "PET_NPROC_PER_NODE": "auto", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
            (3, 2, 8, "job-node-0-0.job", 29500),
        ),
        (SKYPILOT, (2, 1, 8, "10.0.0.4", 29500)),
        ({**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}, (2, 1, None, "10.0.0.4", 29500)),
        (SLURM, (3, 1, 4, "tux01", 21234)),
        (LSF, (2, 1, 4, "node3", 29500)),
        (SAGEMAKER, (2, 1, 8, "algo-1", 29500)),
        (OPEN_MPI, (2, 1, None, "127.0.0.1", 29500)),
    ],
)
def test_a_platforms_variables_identify_this_node(environ, place):
    found = find_place(Options(), environ, MACHINE)
    assert (found.num_nodes, found.index, found.slots, found.host, found.port) == place


def test_pbs_provides_a_file(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("node3.cluster\nnode3.cluster\nnode7.cluster\nnode7.cluster\nnode7.cluster\n")
    found = find_place(Options(), {"PBS_NODEFILE": str(nodes)}, MACHINE)
    assert (found.num_nodes, found.index, found.slots, found.host) == (2, 1, 3, "node3.cluster")


def test_flags_take_precedence():
    found = find_place(Options(num_nodes=5, node_rank=4, meet="other:1234", slots=2), KUBEFLOW, MACHINE)
    assert (found.num_nodes, found.index, found.slots, found.host, found.port) == (5, 4, 2, "other", 1234)
    assert find_place(Options(num_nodes=2, node_rank=0), {"MASTER_ADDR": "a", "MASTER_PORT": "77"}, MACHINE).port == 77


@pytest.mark.parametrize(
    ("environ", "flags", "words"),
    [
        ({}, {}, "--nnodes is missing"),
        ({}, {"num_nodes": 2}, "--node-rank is missing"),
        ({}, {"num_nodes": 2, "node_rank": 1}, "--meet HOST:PORT is missing"),
        ({}, {"num_nodes": 2, "node_rank": 2, "meet": "a:1"}, "node 2 of 2"),
        ({}, {"num_nodes": 2, "node_rank": 1, "meet": "a:x"}, "--meet takes HOST:PORT, but it is 'a:x'"),
        (
            {**KUBEFLOW, "PET_MASTER_ADDR": ""},
            {},
            "PET_MASTER_ADDR is not set although other variables of Kubeflow are",
        ),
        ({**KUBEFLOW, "PET_NNODES": "1:3"}, {}, "PET_NNODES must be a whole number, but it is '1:3'"),
        ({"LSB_MCPU_HOSTS": "a 4 b 4"}, {}, "this machine, node7.cluster, is not among the LSF nodes a, b"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            {},
            "nothing says where the nodes meet .Open MPI.; give --meet",
        ),
        ({"SLURM_JOB_ID": "1"}, {}, "leave --join out"),
    ],
)
def test_an_incomplete_specification_names_the_missing_part(environ, flags, words):
    with pytest.raises(ValueError, match=words):
        find_place(Options(**flags), environ, MACHINE)


def joining(agents, *, secret=SECRET, **header):
    def reach(limit_s):
        return connect(("127.0.0.1", agents.port), credentials(secret), timeout_s=limit_s)

    connection = ClientSession(reach(30), reach)
    connection.send(*pack(JOIN._replace(**header)))
    return connection, unpack(MESSAGES, *connection.receive(limit_s=30))


@pytest.fixture
def agents():
    opened = Agents(("127.0.0.1", 0), SECRET, num_nodes=2, silence_limit_s=60, own=HostInfo("a", 1))
    yield opened
    opened.dismiss(0)


def test_nodes_join_under_unique_names(agents):
    connection, welcome = joining(agents)
    assert isinstance(welcome, Welcome)
    assert agents.hosts() == [HostInfo("a", 1), HostInfo("b", 2)]
    second, _ = joining(agents, node=2, name="b")
    assert agents.hosts()[2] == HostInfo("b-2", 2)  # a unique name
    agents.wait(1.0)
    second.close()
    wait_until("the second node is gone", lambda: len(agents.hosts()) == 2)
    back, _ = joining(agents, node=2, name="b")
    assert agents.hosts()[2] == HostInfo("b-2-2", 2)  # its old name may be barred
    back.close()
    connection.close()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"version": "0.0.1"}, "it has Hora 0.0.1, but the first node has"),
        ({"protocol": 99}, "install the same version on every node"),
        ({"node": 0}, "the nodes that may join are 1 to 2"),
        ({"node": 3}, "the nodes that may join are 1 to 2"),
        ({"slots": 0}, "it offers 0 slots"),
    ],
)
def test_unsuitable_nodes_are_rejected_with_an_explanation(agents, header, words):
    connection, answer = joining(agents, **header)
    assert isinstance(answer, Refused)
    assert words in answer.why
    with pytest.raises(RuntimeError, match=words):
        agents.wait(30.0)
    connection.close()


def test_two_nodes_with_the_same_number(agents):
    first, _ = joining(agents)
    second, answer = joining(agents)
    assert "another node of that number has joined already" in answer.why
    first.close()
    second.close()


def test_a_node_that_does_not_join_is_named(agents):
    connection, _ = joining(agents)
    with pytest.raises(StartTimeoutError, match=r"Node 2 did not come to port \d+.*Timeout after 0.2 seconds"):
        agents.wait(0.2)
    connection.close()


def test_a_member_that_sends_messages_before_it_has_joined_is_disconnected(agents):
    connection = connect(("127.0.0.1", agents.port), credentials(SECRET), timeout_s=30)
    connection.send(*pack(Output(0, "stdout", b"x")))
    with pytest.raises(EOFError):
        connection.receive(limit_s=30)
    connection.close()


def test_a_node_with_a_wrong_secret_is_rejected(agents):
    with pytest.raises((OSError, RuntimeError)):
        joining(agents, secret=new_secret())
    assert agents.hosts() == [HostInfo("a", 1)]


def test_unauthenticated_connections_do_not_keep_a_node_away(agents):
    port = ("127.0.0.1", agents.port)
    strangers = [socket.create_connection(port, timeout=30) for _ in range(5)]
    nonsense = (b"", b"\0" * 3, b"GET / HTTP/1.1\r\n\r\n", json.dumps(JOIN._asdict()).encode(), b"\xff" * 999)
    for stranger, said in zip(strangers, nonsense, strict=True):
        stranger.sendall(said)
    assert agents.hosts() == [HostInfo("a", 1)]
    connection, welcome = joining(agents)
    assert isinstance(welcome, Welcome)
    for stranger in strangers:
        stranger.close()
    connection.close()


def test_an_impostor_of_the_first_node_learns_nothing():
    heard = bytearray()

    def listen(server: socket.socket) -> None:
        with server.accept()[0] as sock:
            sock.settimeout(30)
            sock.sendall(b"\x5a" * 400)  # not a valid proof
            with contextlib.suppress(OSError):
                while data := sock.recv(4096):
                    heard.extend(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen, args=(server,), daemon=True)
        thread.start()
        place = Node(num_nodes=2, index=1, host="127.0.0.1", port=server.getsockname()[1], slots=1)
        with pytest.raises((RuntimeError, OSError)):
            join(place, credentials(SECRET), limit_s=2.0)
        thread.join(30)
    for shown in (SECRET, SECRET.hex().encode(), credentials(SECRET).secret, b"Join", version().encode()):
        assert shown not in heard


ALLOCATED = {
    "SLURM_JOB_ID": "9",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
}


@pytest.fixture
def srun(tmp_path):
    program = tmp_path / "srun"
    program.touch()
    program.chmod(0o755)
    return {"PATH": str(tmp_path)}


@pytest.mark.parametrize(("num_proc", "slots"), [(None, (2, 1)), (3, (2, 1)), (4, (4, 4)), (8, (4, 4))])
def test_slots_of_an_allocation(srun, num_proc, slots):
    found = allocation(Options(num_proc=num_proc), {**ALLOCATED, **srun})
    assert [host.slots for host in found.hosts] == list(slots)
    assert [host.hostname for host in found.hosts] == ["n1", "n2"]


def test_the_components_of_a_heterogeneous_job(srun):
    components = {
        "SLURM_HET_SIZE": "2",
        **{f"{name}_HET_GROUP_0": value for name, value in ALLOCATED.items()},
        "SLURM_JOB_ID_HET_GROUP_1": "10",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "big7",
        "SLURM_TASKS_PER_NODE_HET_GROUP_1": "8",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "64",
        "SLURM_GPUS_PER_TASK_HET_GROUP_1": "a100:2",
    }
    found = allocation(Options(num_proc=11), {**ALLOCATED, **components, **srun})
    assert found.hosts == (HostInfo("n1", 2), HostInfo("n2", 1), HostInfo("big7", 8))
    assert [component.nodes for component in found.components] == [("n1", "n2"), ("big7",)]
    gpus = [component.gpus_of(node) for component in found.components for node in component.nodes]
    assert gpus == ["", "", "a100:16"]


def test_requests_beyond_the_allocation_are_rejected(srun):
    with pytest.raises(ValueError, match="-np 9, but the Slurm job has 3 tasks and 8 cores on 2 nodes"):
        allocation(Options(num_proc=9), {**ALLOCATED, **srun})
    with pytest.raises(ValueError, match="SLURM_TASKS_PER_NODE speaks of 3 nodes"):
        allocation(Options(num_proc=2), {**ALLOCATED, **srun, "SLURM_TASKS_PER_NODE": "1(x3)"})


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        ({"hosts": "a:1,b:1"}, {}),
        ({}, {"SLURM_STEP_ID": "0"}),
        ({}, {"SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}),
        ({}, {"PATH": "/nowhere"}),
        ({}, {"SLURM_JOB_ID": ""}),
    ],
)
def test_other_launch_modes_ignore_the_allocation(srun, options, environ):
    assert allocation(Options(num_proc=2, **options), {**ALLOCATED, **srun, **environ}) is None


def test_lsf_hosts_without_numbers_of_slots_are_rejected():
    with pytest.raises(ValueError, match="LSB_MCPU_HOSTS must be hosts, each with its slots, but it is 'node3 many'"):
        find_place(Options(), {"LSB_MCPU_HOSTS": "node3 many"}, MACHINE)
