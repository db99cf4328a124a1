"""Ranks of Spark tasks: grouped by host, task 0's host first, GPUs by local rank; and tasks that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from hora.launch.agent.protocol import Exited
from hora.launch.job import WorkerSpec
from hora.launch.providers.spark.driver import TaskAgent, TaskAgents
from hora.launch.providers.spark.elastic import _ElasticLauncher
from hora.launch.providers.spark.launcher import place_tasks
from hora.launch.slots import place_ranks, visible_gpus
from waiting import wait_until


def tasks_on(*hosts: str, gpus: Sequence[Sequence[str]] = ()) -> list[TaskAgent]:
    given = gpus or [()] * len(hosts)
    return [TaskAgent(f"{host}-{n}", task=n, host=host, gpus=given[n]) for n, host in enumerate(hosts)]


def test_ranks_are_consecutive_within_a_host() -> None:
    assert [(p.host, p.task) for p in place_tasks(tasks_on("b", "a", "b", "a"))] == [
        ("b", 0),
        ("b", 2),
        ("a", 1),
        ("a", 3),
    ]


def test_hosts_are_rotated_until_the_host_of_task_0_comes_first() -> None:
    assert [p.host for p in place_tasks(tasks_on("c", "a", "d", "b"))] == ["c", "d", "a", "b"]


def test_gpus_of_the_host_are_in_local_rank_order() -> None:
    gpus = [task.gpus for task in place_tasks(tasks_on("a", "a", gpus=[("3", "1"), ("0", "2")]))]
    assert gpus == [("3", "1"), ("0", "2")]
    assert [visible_gpus(own, gpus) for own in gpus] == [("3", "0", "1", "2")] * 2


def test_tasks_that_share_a_gpu_see_only_their_own() -> None:
    assert visible_gpus((), [(), ()]) == ()
    assert visible_gpus(("0",), [("0",), ("0",)]) == ("0",)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_task_gets_one_rank_and_task_0s_host_has_rank_0(hosts: list[str]) -> None:
    placed = place_tasks(tasks_on(*hosts))
    assert sorted(p.task for p in placed) == list(range(len(hosts)))
    assert placed[0].task == 0
    assert all(p.host == hosts[p.task] for p in placed)


def test_a_task_has_arrived_when_its_connection_is_there() -> None:
    """Rank 0's address is where its task connects from."""
    with TaskAgents(1, bind_address="127.0.0.1", address="127.0.0.1") as driver:
        agent = TaskAgent("a", task=0, host="a")
        driver._nodes[0] = driver._arrived["a"] = agent  # admitted, and not welcome yet
        assert driver.tasks() == []
        assert driver.meet(1, lambda: False) is None
        agent.peer = Mock(host="10.0.0.7")
        arrived = driver.meet(1, lambda: False)
        assert arrived is not None
        assert [task.address for task in arrived] == ["10.0.0.7"]
        del driver._nodes[0]


def test_the_end_of_a_lost_attempts_worker_fails_no_later_attempt() -> None:
    lost, later = (TaskAgent(name, task=0, host="a") for name in ("a", "a-0"))
    driver = Mock(agent=lambda name: {"a": lost, "a-0": later}[name], address="127.0.0.1")
    driver.is_own.return_value = False
    launcher, ends = _ElasticLauncher(driver, Mock(bind_gpus=False, python=None)), SimpleQueue[Exited]()
    spec = WorkerSpec(worker=3, slot=place_ranks(["a"])[0], argv=("", "-m", "x"), env={}, private_files={})
    launcher.start([spec], Mock(exited=ends.put))
    lost.lost(255)  # the later attempt has joined already
    assert ends.get(timeout=30).code == 137
    wait_until("its own task was failed", lambda: lost.dismissed)
    assert not later.dismissed
