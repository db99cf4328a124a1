"""Ranks of Spark tasks: grouped by host, task 0's host first, GPUs by local rank."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hora.launch.providers.spark.driver import TaskAgent
from hora.launch.providers.spark.launcher import place_tasks
from hora.launch.slots import visible_gpus


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
