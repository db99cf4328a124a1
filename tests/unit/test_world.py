"""Who am I: every launcher's variables, and nonsense in them."""

from __future__ import annotations

import pytest

from hora.world import MeetingPoint, World

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


def test_nothing_set_is_a_world_of_one():
    world = World.from_env({})
    assert (
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.cross_rank,
        world.cross_size,
    ) == (0, 1, 0, 1, 0, 1)
    assert world.meeting.kind == "none"


def test_horovod_variables_come_before_the_others():
    world = World.from_env(TORCHRUN | {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"})
    assert (world.rank, world.size) == (0, 1)


def test_torchrun():
    world = World.from_env(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert (world.cross_rank, world.cross_size) == (1, 2)
    assert world.meeting == MeetingPoint(kind="tcp", address="10.0.0.1", port=29500, job="abc", host_store=False)


def test_open_mpi_on_one_host():
    env = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_MCA_ess_base_jobid": "12345",
    }
    ours = World.from_env(env)
    other = World.from_env(env | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert (ours.rank, ours.size, ours.local_rank) == (1, 2, 1)
    assert ours.meeting.endpoint == other.meeting.endpoint
    assert (ours.meeting.host_store, other.meeting.host_store) == (False, True)


def test_pmi():
    env = {
        "PMI_RANK": "2",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    world = World.from_env(env)
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
    world = World.from_env(env)
    assert (world.rank, world.size, world.local_rank, world.local_size, world.cross_rank) == (5, 8, 1, 4, 1)
    assert world.meeting.address == "node03"


def test_inside_an_allocation_but_outside_a_step_is_a_world_of_one():
    assert World.from_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}).size == 1


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
        ({"RANK": "x", "WORLD_SIZE": "1"}, ["RANK", "'x'"]),
        (
            {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "4", "HOROVOD_LOCAL_SIZE": "2"},
            ["local", "4"],
        ),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_CROSS_SIZE": "x"}, ["HOROVOD_CROSS_SIZE"]),
    ],
)
def test_nonsense_is_named(env, words):
    with pytest.raises(ValueError) as caught:
        World.from_env(env)
    for word in words:
        assert word in str(caught.value)


def test_a_world_survives_the_environment():
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
        meeting=MeetingPoint(kind="hora", address="127.0.0.1", port=5, secret_file="/proc/1/fd/3", job="j"),
    )
    assert World.from_env(world.to_env()) == world
