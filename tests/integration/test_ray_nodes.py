"""Elastic jobs on Ray while nodes fall silent, drain, join and leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

pytest.importorskip("ray")

import ray
from ray_cluster import RayCluster, nothing_is_left
from ray_training import INTERVAL, Misfortune, Stages, elastic_settings, train

from horovod.ray import ElasticRayExecutor, RayExecutor
from waiting import wait_until

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(num_nodes=1, by_value=[__name__]) as running:
        yield running


def raylet_of(node: Any) -> psutil.Process:
    (started,) = node.all_processes["raylet"]
    return psutil.Process(started.process.pid)


def workers_of(node: Any) -> list[psutil.Process]:
    return [child for child in raylet_of(node).children(recursive=True) if "RayWorker" in " ".join(child.cmdline())]


def silence(node: Any) -> None:
    """Stop the node's processes: none of them answers or exits."""
    for process in [raylet_of(node), *workers_of(node)]:
        process.suspend()


def kill(node: Any) -> None:
    """Kill the node's raylet; Ray's workers exit with it."""
    raylet_of(node).kill()


def drain(node: Any) -> None:
    """Drain the node, as when a cloud provider announces a preemption."""
    client = ray._raylet.GcsClient(address=node.gcs_address)
    (node_id,) = [one["NodeID"] for one in REAL_NODES() if one["RayletSocketName"] == node.raylet_socket_name]
    preemption = 2
    if VERSION < (2, 10):  # has no deadline argument
        assert client.drain_node(node_id, preemption, "taken back")
        return
    accepted, why = client.drain_node(node_id, preemption, "taken back", 0)
    assert accepted, why


def hosts_by_resource() -> list[dict[str, Any]]:
    """Return Ray's nodes under the names of hosts; all of them have this machine's address."""
    found = []
    for node in REAL_NODES():
        names = [name.removeprefix("node:") for name in node["Resources"] if name.startswith("node:host-")]
        found.append({**node, "NodeManagerAddress": names[0] if names else node["NodeManagerAddress"]})
    return found


REAL_NODES = ray.nodes
VERSION = tuple(map(int, ray.__version__.split(".")[:2]))


@pytest.mark.parametrize("misfortune", [silence, kill, drain])
@mock.patch(INTERVAL, 0.1)
def test_losing_a_node_costs_only_its_workers(cluster, tmp_path: Path, monkeypatch, misfortune):
    monkeypatch.setattr(ray, "nodes", hosts_by_resource)
    settings = RayExecutor.create_settings(timeout_s=120)
    processes: list[psutil.Process] = []
    with cluster.another_node() as (host, node):

        def happens(beginners: dict[int, str]) -> str:
            processes.extend(workers_of(node))
            misfortune(node)
            return host

        watching = Misfortune(2, happens, 1, tmp_path)
        # A worker needs both cores of a node, so each node runs one.
        with RayExecutor(settings, min_workers=1, max_workers=2, cpus_per_worker=2, elastic_timeout=120) as executor:
            executor.start()
            results = executor.run(train, args=[str(tmp_path)], callbacks=[watching])
        assert sorted(watching.beginners.values()) == sorted(["host-1", host])
        assert [(rank, size) for rank, size, _, _ in results] == [(0, 1)]
        (survivor,) = [pid for pid, where in watching.beginners.items() if where == "host-1"]
        assert results[0][2] == survivor  # still the same process
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()
    wait_until("the node's processes have ended", lambda: not any(process.is_running() for process in processes))
    nothing_is_left()


@mock.patch(INTERVAL, 0.1)
@pytest.mark.skipif(VERSION < (2, 40), reason="an old Ray does not end a stopped process")
def test_a_stopped_worker_is_dropped_and_replaced(cluster, tmp_path: Path):
    """Ray does not notice: the node is healthy and the process exists.

    The user sets how long a silence may last.
    """

    def stop_one(beginners: dict[int, str]) -> int:
        victim = max(beginners)
        psutil.Process(victim).suspend()
        return victim

    watching = Misfortune(2, stop_one, 2, tmp_path)
    settings = RayExecutor.create_settings(timeout_s=120)
    with RayExecutor(settings, min_workers=1, max_workers=2, elastic_timeout=120) as executor:
        executor.start(extra_env_vars={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"})
        results = executor.run(train, args=[str(tmp_path)], callbacks=[watching])
    assert [(rank, size) for rank, size, _, _ in results] == [(0, 2), (1, 2)]
    pids = [pid for _, _, pid, _ in results]
    assert pids[0] in watching.beginners
    assert pids[1] not in watching.beginners
    wait_until("the stopped process has ended", lambda: not psutil.pid_exists(watching.victim))
    nothing_is_left()


# ---- hosts are added and removed, as in Horovod's own tests of discovery -------------------------------------------


@pytest.fixture(scope="module")
def wide(cluster: RayCluster) -> None:
    """A node that stands for five hosts and has room for all of their slots."""
    cluster.add_node(num_cpus=8, resources={f"node:h{number}": 1 for number in range(1, 6)})


SCHEDULES = {
    "added and removed": ([{"h1": 2}, {"h1": 2, "h2": 1, "h3": 1}, {"h2": 1}], {}, (4, 1)),
    "removed and added": (
        [{"h1": 2, "h2": 1, "h3": 2}, {"h1": 2}, {"h1": 2, "h4": 1, "h5": 1}],
        {"cooldown_range": (1, 1)},
        (7, 4),
    ),
    "no more than two": ([{"h1": 2}, {"h1": 2, "h2": 1}], {"max_num_proc": 2}, (2, 2)),
    "no fewer than four": (
        [{"h1": 1}, {"h1": 1, "h2": 2}, {"h1": 1, "h2": 2, "h3": 1}],
        {"min_num_proc": 4, "max_num_proc": 4},
        (4, 4),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@mock.patch(INTERVAL, 0.1)
def test_hosts_are_added_and_removed(wide, tmp_path: Path, name: str):
    stages, limits, (num_started, num_finished) = SCHEDULES[name]
    settings = elastic_settings({}, **limits)
    least, most = limits.get("min_num_proc", 1), limits.get("max_num_proc")
    settings.discovery = schedule = Stages(stages, tmp_path, least=least, most=most)
    executor = ElasticRayExecutor(settings, override_discovery=False)
    executor.start()
    results = executor.run(lambda: train(str(tmp_path)), callbacks=[schedule])
    assert (len(schedule.started), len(schedule.finished)) == (num_started, num_finished)
    assert len(results) == num_finished
    assert [rank for rank, *_ in results] == list(range(num_finished))
    nothing_is_left()


class Replacement:
    """A discovery and a log callback: once the first hosts train, each call of discovery returns the next stage,
    regardless of which hosts have the state. Ends the training when the last stage's only host trains alone.
    """

    def __init__(self, stages: list[dict[str, int]], directory: Path) -> None:
        self._stages, self._directory, self._begun = list(stages), directory, False
        self.steps: dict[str, list[int]] = {}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        found = dict(self._stages[0])
        if self._begun and len(self._stages) > 1:
            self._stages.pop(0)
        return found

    def __call__(self, entry: dict[str, Any]) -> None:
        if "step" in entry:
            self.steps.setdefault(entry["host"], []).append(entry["step"])
            self._begun = self._begun or entry["step"] > 3
            if entry["size"] == 1 and [entry["host"]] == list(self._stages[0]):
                (self._directory / "over").touch()


@mock.patch(INTERVAL, 0.1)
def test_all_hosts_are_replaced_before_the_new_ones_have_the_state(wide, tmp_path: Path):
    """Horovod's own schedule, with stages a tenth of a second apart."""
    settings = elastic_settings({}, min_num_proc=1)
    settings.discovery = schedule = Replacement([{"h1": 2}, {"h1": 2, "h2": 1, "h3": 1}, {"h2": 1}], tmp_path)
    executor = ElasticRayExecutor(settings, override_discovery=False)
    executor.start()
    ((rank, size, _, steps),) = executor.run(lambda: train(str(tmp_path)), callbacks=[schedule])
    assert (rank, size) == (0, 1)
    assert min(schedule.steps["h2"]) > 3, "it began anew"
    assert steps == max(schedule.steps["h2"])
    nothing_is_left()
