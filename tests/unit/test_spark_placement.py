"""Ranks of Spark tasks: grouped by host, task 0's host first, GPUs by local rank; and tasks that come and go."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from hora.launch.agent.protocol import Exited
from hora.launch.job import WorkerSpec
from hora.launch.providers.spark.driver import SparkStage, TaskAgent, TaskAgents
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
    driver.reach = lambda host: driver.agent(host.hostname)
    launcher, ends = _ElasticLauncher(driver, Mock(bind_gpus=False, python=None)), SimpleQueue[Exited]()
    spec = WorkerSpec(worker=3, slot=place_ranks(["a"])[0], argv=("", "-m", "x"), env={}, private_files={})
    launcher.start([spec], Mock(exited=ends.put))
    lost.lost(255)  # the later attempt has joined already
    assert ends.get(timeout=30).code == 137
    wait_until("its own task was failed", lambda: lost.dismissed)
    assert not later.dismissed


def test_stages_that_start_together_leave_sparks_environment_unchanged() -> None:
    """Otherwise UDFs would run in the Python workers that have a warm process."""
    second_inside, first_over = threading.Event(), threading.Event()
    context = Mock(environment={"A": "1"})

    class Tasks:
        def __init__(self, before: threading.Event, inside: threading.Event) -> None:
            self.before, self.inside, self.collect = before, inside, Mock()

        @property
        def _jrdd(self) -> None:
            assert context.environment["HORA_SPARK_WORKER"] == "1"
            self.inside.set()
            self.before.wait(0.5)

    first_inside = threading.Event()
    stages = []
    for tasks in (Tasks(second_inside, first_inside), Tasks(first_over, second_inside)):
        own = Mock(parallelize=Mock(return_value=Mock(mapPartitions=Mock(return_value=tasks))))
        own.getConf().get.return_value = "false"
        stage = SparkStage(own, 1, print, group="g", barrier=False)
        stage.context = Mock(wraps=context, parallelize=own.parallelize)
        type(stage.context).environment = property(
            lambda _: context.environment, lambda _, value: setattr(context, "environment", value)
        )
        stages.append(stage)
    threads = [threading.Thread(target=stage._run) for stage in stages]
    threads[0].start()
    assert first_inside.wait(30)
    threads[1].start()
    threads[0].join(30)
    first_over.set()
    threads[1].join(30)
    assert [stage.error for stage in stages] == [None, None]
    assert context.environment == {"A": "1"}
