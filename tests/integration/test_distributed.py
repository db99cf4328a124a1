"""`@hora.distributed`: one function, called locally and on the ranks of a job."""

from __future__ import annotations

import os

import pytest

import hora


@hora.distributed(num_processes=2)
def place(greeting: str, *, mark: str = "") -> tuple[str, str | None]:
    """Where it is called."""
    return greeting + mark, os.environ.get("HOROVOD_RANK")


def test_local_and_distributed_calls():
    assert place("hello") == ("hello", None)
    assert place.distributed("hello", mark="!") == [("hello!", "0"), ("hello!", "1")]
    assert (place.__name__, place.__doc__) == ("place", "Where it is called.")


def test_on_ssh_uses_the_given_hosts(monkeypatch):
    monkeypatch.setenv("HORA_SSH", "false")  # both names are this machine: no ssh is needed
    hosts = hora.distributed(num_processes=2, on="ssh", hosts="localhost:1,127.0.0.2:1")
    assert hosts(lambda: os.environ["HOROVOD_HOSTNAME"]).distributed() == ["localhost", "127.0.0.2"]


def test_the_exception_of_a_failing_rank_is_raised():
    @hora.distributed(num_processes=2)
    def fails(rank: str) -> None:
        if os.environ["HOROVOD_RANK"] == rank:
            raise ValueError("oh no")

    with pytest.raises(RuntimeError, match="oh no") as caught:
        fails.distributed("1")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_processes": 2, "on": "moon"}, "on must be one of local, ssh, slurm, spark, ray, but it is 'moon'"),
        ({"num_processes": 0}, "num_processes must be a whole number, at least 1"),
        ({"num_processes": 2, "on": "ssh"}, 'on="ssh" needs hosts='),
    ],
)
def test_invalid_arguments_are_rejected(arguments, words):
    with pytest.raises(ValueError, match=words):
        hora.distributed(**arguments)


def test_slurm_needs_an_allocation(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(RuntimeError, match="inside an allocation: salloc"):
        hora.distributed(num_processes=2, on="slurm")(os.getpid).distributed()


@pytest.mark.spark
def test_on_spark(spark, by_value):
    found = hora.distributed(num_processes=2, on="spark", verbose=0)(lambda x: (x, os.environ["HOROVOD_RANK"]))
    assert found.distributed(3) == [(3, "0"), (3, "1")]
