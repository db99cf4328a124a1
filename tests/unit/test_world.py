"""The place of a process in its world, read from every launcher's variables; invalid values are rejected."""

from __future__ import annotations

import pytest

from hora.platforms.detect import detect_world
from hora.platforms.horovod import variables_of
from hora.platforms.slurm import nodes_of
from hora.world import RendezvousEndpoint, World

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "abc",
}


def test_without_variables_the_world_has_one_rank():
    world = detect_world({})
    assert (
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.cross_rank,
        world.cross_size,
    ) == (0, 1, 0, 1, 0, 1)
    assert world.rendezvous.kind == "none"


def test_horovod_variables_take_precedence():
    world = detect_world(TORCHRUN | {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"})
    assert (world.rank, world.size) == (0, 1)


def test_torchrun():
    world = detect_world(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert (world.cross_rank, world.cross_size) == (1, 2)
    assert world.rendezvous == RendezvousEndpoint(
        kind="tcp", address="10.0.0.1", port=29500, job="abc/0", host_store=False
    )
    again = detect_world(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert again.rendezvous.job == "abc/2"  # the agent's store may still hold entries of an earlier attempt


def test_open_mpi_on_one_host():
    env = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_MCA_ess_base_jobid": "12345",
    }
    ours = detect_world(env)
    other = detect_world(env | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert (ours.rank, ours.size, ours.local_rank) == (1, 2, 1)
    assert ours.rendezvous == other.rendezvous
    assert ours.rendezvous.host_store


def test_a_users_secret_file_applies_to_every_foreign_launcher():
    place = {"HORA_SECRET_FILE": "/home/me/secret", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    for rank, size in (("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE")):
        rendezvous = detect_world(place | {rank: "0", size: "2"}).rendezvous
        assert (rendezvous.kind, rendezvous.secret_file) == ("tcp", "/home/me/secret")
    slurm_step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert detect_world(slurm_step | {"HORA_SECRET_FILE": "f"}).rendezvous.secret_file == "f"


def test_pmi():
    env = {
        "PMI_RANK": "2",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    world = detect_world(env)
    assert (world.rank, world.local_rank, world.cross_rank, world.cross_size) == (2, 0, 1, 2)


def test_slurm_step():
    env = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "node[03-04]",
    }
    world = detect_world(env)
    assert (world.rank, world.size, world.local_rank, world.local_size, world.cross_rank) == (5, 8, 1, 4, 1)
    assert world.rendezvous.address == "node03"


SLURM = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "r[1-2]n[01-02]-ib"}


STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("other", [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "78"}, {"SLURM_RESTART_COUNT": "1"}])
def test_steps_and_runs_of_a_slurm_job_have_names_and_ports_of_their_own(other):
    one, two = (detect_world(env).rendezvous for env in (STEP, STEP | other))
    assert one == detect_world(STEP | {"SLURM_PROCID": "0"}).rendezvous
    assert one.job != two.job
    assert one.ports != two.ports
    assert len(set(one.ports)) > 4
    chosen = {"MASTER_ADDR": "h", "MASTER_PORT": "5"}
    one, two = (detect_world(env | chosen).rendezvous for env in (STEP, STEP | other))
    assert one.job != two.job
    assert one.ports == two.ports == (5,)


def test_the_components_of_a_heterogeneous_slurm_step_meet():
    first, second = ({"SLURM_HET_JOB_ID": "77", "SLURM_JOB_ID": number} for number in ("77", "78"))
    assert detect_world(STEP | first).rendezvous == detect_world(STEP | second).rendezvous


def test_two_mpiruns_of_a_slurm_job_have_names_of_their_own():
    """Open MPI 4 starts the daemons of other nodes, and so their ranks, in a step of their own."""
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    one = detect_world(mpi | STEP | {"OMPI_MCA_ess_base_jobid": "1"}).rendezvous
    assert one != detect_world(mpi | STEP | {"OMPI_MCA_ess_base_jobid": "2"}).rendezvous
    assert one == detect_world(mpi | {"SLURM_JOB_ID": "77", "OMPI_MCA_ess_base_jobid": "1"}).rendezvous
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    one, two = (detect_world(hydra | STEP | {"SLURM_STEP_ID": step}).rendezvous for step in "01")
    assert one.job != two.job


def test_slurm_tasks_per_node_are_those_of_the_step_not_the_limit():
    asked = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    world = detect_world(SLURM | asked | {"SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "1(x4)"})
    assert (world.local_size, world.cross_rank, world.cross_size) == (1, 3, 4)
    assert world.rendezvous.address == "r1n01-ib"


def test_slurm_nodes_with_different_numbers_of_tasks():
    """2(x3),1: the last node has one task, so the second task of a node has two peers."""
    places = []
    for rank in range(7):
        mine = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)}
        world = detect_world(SLURM | mine | {"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "2(x3),1"})
        places.append((world.local_rank, world.local_size, world.cross_rank, world.cross_size))
    assert places == [(0, 2, 0, 4), (1, 2, 0, 3), (0, 2, 1, 4), (1, 2, 1, 3), (0, 2, 2, 4), (1, 2, 2, 3), (0, 1, 3, 4)]


def test_slurm_ranks_distributed_cyclically():
    mine = {
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
    }  # --distribution=cyclic
    world = detect_world(SLURM | mine | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    assert (world.local_rank, world.local_size, world.cross_rank, world.cross_size) == (1, 2, 0, 2)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b1", ["a", "b1"]),
        ("n[5]", ["n5"]),
        ("gnode[10,20]", ["gnode10", "gnode20"]),
        ("tux[001-003,010],login1", ["tux001", "tux002", "tux003", "tux010", "login1"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
        ("", []),
    ],
)
def test_node_lists(text, names):
    assert nodes_of(text) == names


@pytest.mark.parametrize("text", ["n[1-]", "n[a-b]", "n[3-1]", "n[1-99999999]"])
def test_invalid_node_lists(text):
    with pytest.raises(ValueError, match="a node list must look like"):
        nodes_of(text)


def test_open_mpi_on_several_hosts_needs_an_address():
    """With the default 127.0.0.1, the ranks of one host would wait in vain for the others."""
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    env |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_ess_base_jobid": "12345"}
    with pytest.raises(ValueError, match="not where they meet: set MASTER_ADDR and MASTER_PORT"):
        detect_world(env)
    assert detect_world(env | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).rendezvous.address == "10.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "num_nodes", "daemon", "host"),
    [
        ("vm,job-worker-[1:0-1].job.default.svc@0(3)", 2, 1, "job-worker-0.job.default.svc"),  # Kubeflow's operator
        ("n[3:1-2]@0(2)", 2, 0, "n001"),
        ("a,b@0(2)", 2, 0, "a"),
        ("[2:9-10]x,a@0(3)", 3, 0, "09x"),
    ],
)
def test_open_mpi_4_on_several_hosts_meets_on_the_first_host_with_ranks(nodes, num_nodes, daemon, host):
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    env |= {"OMPI_MCA_ess_base_jobid": "12345", "OMPI_MCA_orte_node_regex": nodes}
    env |= {"OMPI_MCA_orte_num_nodes": str(num_nodes)}
    rendezvous = detect_world(env | {"OMPI_COMM_WORLD_RANK": "1"}).rendezvous
    assert rendezvous.address == host
    env |= {"OMPI_COMM_WORLD_RANK": "0"}
    assert detect_world(env | {"OMPI_MCA_orte_local_daemon_uri": f"7.{daemon};tcp://h:1"}).rendezvous == rendezvous
    with pytest.raises(ValueError, match="not where they meet"):
        detect_world(env | {"OMPI_MCA_orte_local_daemon_uri": f"7.{daemon + 1};tcp://h:1"})


def test_inside_an_allocation_but_outside_a_step_the_world_has_one_rank():
    assert detect_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}).size == 1


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ["0..1", "2"]),
        ({"HOROVOD_RANK": "-1", "HOROVOD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ["-1"]),
        ({"HOROVOD_RANK": "zero", "HOROVOD_SIZE": "2"}, ["HOROVOD_RANK", "'zero'"]),
        ({"HOROVOD_RANK": "0"}, ["HOROVOD_SIZE"]),
        ({"HOROVOD_SIZE": "2"}, ["HOROVOD_RANK"]),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "0"}, ["at least 1"]),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, ["MASTER_ADDR", "horovodrun"]),
        (
            {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "many"},
            ["MASTER_PORT", "many"],
        ),
        ({"RANK": "0"}, ["WORLD_SIZE"]),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "3"},
            ["disagree", "4 tasks", "'3'"],
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2*2"},
            ["2(x3),1", "'2*2'"],
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "7"},
            ["SLURM_NODEID is 7", "1 nodes"],
        ),
        ({"RANK": "x", "WORLD_SIZE": "1"}, ["RANK", "'x'"]),
        (
            {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "4", "HOROVOD_LOCAL_SIZE": "2"},
            ["local", "4"],
        ),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_CROSS_SIZE": "x"}, ["HOROVOD_CROSS_SIZE"]),
    ],
)
def test_invalid_values_are_named(env, words):
    with pytest.raises(ValueError) as caught:
        detect_world(env)
    for word in words:
        assert word in str(caught.value)


def test_a_world_survives_a_round_trip_through_the_environment():
    world = World(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        cross_rank=1,
        cross_size=2,
        hostname="b",
        generation=7,
        elastic=True,
        launcher="hora",
        rendezvous=RendezvousEndpoint(kind="hora", address="127.0.0.1", port=5, secret_file="/proc/1/fd/3", job="j"),
    )
    assert detect_world(variables_of(world)) == world


def test_a_rendezvous_of_the_users_own_program():
    env = {
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
    }
    with pytest.raises(ValueError, match="no secret to authenticate with"):
        detect_world(env)
    world = detect_world({**env, "HORA_SECRET_FILE": "/s"})
    assert (world.rendezvous.kind, world.rendezvous.endpoint, world.rendezvous.planned) == (
        "hora",
        "10.0.0.1:1234",
        True,
    )
    assert not world.elastic  # the program itself assigns ranks
    assert detect_world({**env, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}).rendezvous.kind == "none"
    elsewhere = detect_world({**env, "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "5"})
    assert elsewhere.rendezvous.endpoint == "10.0.0.2:5"
