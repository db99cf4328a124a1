"""Ranks of Spark tasks: grouped by host, task 0's host first, GPUs by local rank; and tasks that come and go."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.launch.agent.protocol import MESSAGES, Exited, Join, Message, Quit, Start, Welcome
from hora.launch.controller.agents import credentials
from hora.launch.controller.launcher import AgentHandle, HostLauncher
from hora.launch.job import WorkerSpec
from hora.launch.providers.spark.job import place_tasks
from hora.launch.providers.spark.stage import SparkStage
from hora.launch.providers.spark.tasks import SparkTasks, TaskAgent
from hora.launch.slots import place_ranks, visible_gpus
from hora.net.messages import pack, unpack
from hora.net.session import ClientSession
from hora.net.wire import Connection, connect
from hora.version import version
from waiting import wait_until


def tasks_on(*hosts: str, gpus: Sequence[Sequence[str]] = ()) -> list[AgentHandle]:
    given = gpus or [()] * len(hosts)
    return [TaskAgent(f"{host}-{n}", number=n, host=host, gpus=given[n]) for n, host in enumerate(hosts)]


def test_ranks_are_consecutive_within_a_host() -> None:
    assert [(p.host, p.number) for p in place_tasks(tasks_on("b", "a", "b", "a"))] == [
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
    assert sorted(p.number for p in placed) == list(range(len(hosts)))
    assert placed[0].number == 0
    assert all(p.host == hosts[p.number] for p in placed)


class Task:
    """A task's agent, played by the test."""

    def __init__(self, tasks: SparkTasks, number: int, host: str = "a") -> None:
        def reach(limit_s: float) -> Connection:
            return connect(("127.0.0.1", tasks.port), credentials(tasks.secret), timeout_s=limit_s)

        self.session = ClientSession(reach(30), reach)
        self.session.send(*pack(Join(number, host, 1, version(), [], ["7"])))

    def answer(self) -> Message:
        return unpack(MESSAGES, *self.session.receive(limit_s=30))


@pytest.fixture
def tasks() -> Iterator[SparkTasks]:
    with SparkTasks(2, bind_address="127.0.0.1", address="127.0.0.1") as opened:
        yield opened


def test_a_task_has_arrived_when_it_has_joined(tasks: SparkTasks) -> None:
    """Rank 0's address is where its task connects from."""
    assert tasks.meet(1, lambda: False) is None
    first = Task(tasks, 0)
    assert isinstance(first.answer(), Welcome)
    arrived = tasks.meet(1, lambda: True)
    assert arrived is not None
    assert [(one.address, one.number, one.host, one.gpus) for one in arrived] == [("127.0.0.1", 0, "a", ("7",))]
    first.session.close()


def test_a_task_that_spark_repeats_after_the_start_ends_at_once(tasks: SparkTasks) -> None:
    first = Task(tasks, 0)
    assert tasks.meet(1, lambda: True) is not None
    late = Task(tasks, 1)
    assert late.answer() == Quit(0)
    first.session.close()


def test_a_speculative_copy_waits_for_the_first_attempt(tasks: SparkTasks) -> None:
    first = Task(tasks, 0)
    assert isinstance(first.answer(), Welcome)
    copy = Task(tasks, 0)
    with pytest.raises(TimeoutError):
        copy.session.receive(limit_s=0.2)
    first.session.close()
    assert isinstance(copy.answer(), Welcome)
    copy.session.close()


def test_a_failed_worker_fails_its_task_and_no_later_attempt_of_it() -> None:
    with SparkTasks(1, bind_address="127.0.0.1", address="127.0.0.1", least=1) as tasks:
        first = Task(tasks, 0)
        assert isinstance(first.answer(), Welcome)
        (lost,) = tasks.meet(1, lambda: True) or []
        ends = SimpleQueue[Exited]()
        launcher = HostLauncher(agents=tasks.agents, route=lambda spec: (lost.name, spec), ended=tasks.worker_ended)
        spec = WorkerSpec(worker=3, slot=place_ranks(["a"])[0], argv=("python", "-m", "x"), env={}, private_files={})
        launcher.start([spec], Mock(exited=ends.put))
        assert isinstance(first.answer(), Start)
        first.session.close()
        ended = ends.get(timeout=30)
        assert (ended.code, ended.reason[:23]) == (137, "its Spark task (0) ende")
        later = Task(tasks, 0)
        assert isinstance(later.answer(), Welcome)
        wait_until("the next attempt has come", tasks.agents.connected)
        assert [one.dismissed for one in tasks.agents.connected()] == [False]
        assert lost.name != tasks.agents.connected()[0].name
        tasks.worker_ended(tasks.agents.connected()[0].name, Exited(4, 9, ""))
        assert later.answer() == Quit(9)
        later.session.close()


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
