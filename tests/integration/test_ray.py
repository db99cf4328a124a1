"""`horovod.ray` on a real Ray cluster of two nodes: executors of both kinds, and what is left when something dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest

pytest.importorskip("ray")

import ray
from ray_cluster import RayCluster, living_actors, nothing_is_left

from hora.errors import JobFailedError
from horovod.ray import ElasticRayExecutor, RayExecutor
from horovod.ray.elastic_v2 import RayHostDiscovery
from horovod.runner.elastic.discovery import FixedHosts
from waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

INTERVAL = "horovod.runner.elastic.driver.DISCOVER_HOSTS_FREQUENCY_SECS"
LIMIT_S = 180.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as functions of a notebook do
    with RayCluster() as running:
        yield running
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def settings(cluster: RayCluster):
    yield RayExecutor.create_settings(timeout_s=120, placement_group_timeout_s=60)
    nothing_is_left()


class Trainer:
    """Meets the others in its constructor, as executables do."""

    def __init__(self, factor, offset=0):
        import horovod.torch as hvd

        hvd.init()
        self.factor, self.offset = factor, offset

    def sum(self):
        import torch

        import horovod.torch as hvd

        total = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)
        return hvd.rank(), hvd.local_rank(), hvd.cross_rank(), total[0].item() * self.factor + self.offset


def test_a_fixed_size_on_two_nodes(settings):
    with RayExecutor(settings, num_hosts=2, num_workers_per_host=2) as executor:
        executor.start(Trainer, [10], {"offset": 5}, extra_env_vars={"EARLY": "bird", "HOROVOD_GLOO_IFACE": "lo"})
        assert executor.execute(lambda trainer: trainer.sum()) == [
            (0, 0, 0, 105.0),
            (1, 1, 0, 105.0),
            (2, 0, 1, 105.0),
            (3, 1, 1, 105.0),
        ]
        assert executor.execute_single(lambda trainer: trainer.factor) == 10
        first = executor.run(os.getpid)
        assert ray.get(executor.run_remote(lambda: os.getpid())) == first
        logged = []
        assert (
            executor.run(logs_its_rank, args=["a"], kwargs={"more": "b"}, callbacks=[logged.append, _fails])
            == ["ab"] * 4
        )
        assert sorted(entry["rank"] for entry in logged) == [0, 0, 1, 1, 2, 2, 3, 3]
        seen = executor.run(environment)
        assert [env["HOROVOD_GLOO_IFACE"] for env in seen] == ["lo"] * 4
        assert all(b"EARLY=bird" in env["/proc"] for env in seen)
        assert not any("HORA_SECRET" in env for env in seen)
        with pytest.raises(RuntimeError, match=r"shutdown\(\) first"):
            executor.start()
        with pytest.raises(ZeroDivisionError, match="one_divides"):
            executor.run(one_divides)
        assert executor.run(meet_again) == [4.0] * 4
        assert executor.run(os.getpid) == first
        executor.shutdown()
        executor.shutdown()
        nothing_is_left()
        wait_until("the processes have ended", lambda: not any(psutil.pid_exists(pid) for pid in first))


def logs_its_rank(text, more):
    import horovod.torch as hvd
    from horovod.ray import ray_logger

    for number in range(2):
        ray_logger.log({"rank": hvd.rank(), "number": number})
    return text + more


def _fails(entry):
    raise ValueError("a callback that fails keeps nobody from anything")


def environment():
    return {**os.environ, "/proc": Path("/proc/self/environ").read_bytes()}


def one_divides():
    """Rank 1 raises, and the others would wait for it."""
    import torch

    import horovod.torch as hvd

    return 1 / 0 if hvd.rank() == 1 else hvd.allreduce(torch.ones(1), name="with rank 1")


def meet_again():
    import torch

    import horovod.torch as hvd

    hvd.shutdown()
    hvd.init()
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_a_dead_worker_ends_the_others_and_is_named(settings):
    executor = RayExecutor(settings, num_workers=2)
    executor.start(Trainer, [1])
    pids = executor.run(os.getpid)
    with pytest.raises(JobFailedError, match=r"rank 1 died: process \d+ on .* \(Ray node"):
        executor.run(one_is_killed)
    wait_until("the other has ended too", lambda: not any(psutil.pid_exists(pid) for pid in pids))
    with pytest.raises(RuntimeError, match="cannot go on: rank 1 died"):
        executor.run(os.getpid)
    executor.shutdown()
    executor.start()
    assert len(set(executor.run(os.getpid)) | set(pids)) == 4
    executor.shutdown()


def one_is_killed():
    import torch

    import horovod.torch as hvd

    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(1), name="with the dead")


def test_what_does_not_fit_leaves_nothing_behind(settings):
    settings.placement_group_timeout_s = 2
    with pytest.raises(TimeoutError, match="requested were 100 bundles"):
        RayExecutor(settings, num_workers=100).start()
    with pytest.raises(TimeoutError, match="STRICT_SPREAD"):
        RayExecutor(settings, num_hosts=9).start()


# ---- elastic --------------------------------------------------------------------------------------------------


def train(directory):
    """Steps, committed one by one, until the test says that it is over."""
    import time

    import horovod.torch as hvd
    from horovod.ray import ray_logger

    hvd.init()
    ray_logger.log({"started": os.getpid()})
    state = hvd.elastic.TorchState(step=0)

    @hvd.elastic.run
    def loop(state):
        while not hvd.broadcast_object(os.path.exists(f"{directory}/over"), root_rank=0):
            state.step += 1
            host = os.environ["HOROVOD_HOSTNAME"]
            ray_logger.log({"step": state.step, "pid": os.getpid(), "host": host, "size": hvd.size()})
            time.sleep(0.02)
            state.commit()

    loop(state)
    ray_logger.log({"finished": os.getpid()})
    return hvd.rank(), hvd.size(), os.getpid(), state.step


def elastic_settings(hosts, **limits):
    settings = ElasticRayExecutor.create_settings(timeout_s=120, elastic_timeout=120, **limits)
    settings.discovery = FixedHosts(hosts)
    return settings


class Misfortune:
    """A callback: when all have begun, something happens; when the size is right again, the training is over."""

    def __init__(self, size, happens, size_afterwards, directory):
        self.size, self.happens, self.size_afterwards, self.directory = size, happens, size_afterwards, directory
        self.beginners, self.victim = {}, None

    def __call__(self, entry):
        if "step" not in entry:
            return
        if self.victim is None:
            self.beginners[entry["pid"]] = entry["host"]
            if len(self.beginners) == self.size and entry["step"] > 3:
                self.victim = self.happens(self.beginners)
        elif entry["size"] == self.size_afterwards and (
            self.size_afterwards < self.size or entry["pid"] not in self.beginners
        ):
            (self.directory / "over").touch()


def kill_one(beginners):
    victim = next(pid for pid, host in beginners.items() if host == "host-1")
    os.kill(victim, signal.SIGKILL)
    return victim


@mock.patch(INTERVAL, 0.1)
def test_a_killed_worker_costs_that_worker(cluster, tmp_path):
    settings = elastic_settings({"host-1": 1, "host-2": 1}, min_num_proc=1, max_num_proc=2)
    executor = ElasticRayExecutor(settings, override_discovery=False)
    misfortune = Misfortune(2, kill_one, 2, tmp_path)
    executor.start()
    results = executor.run(lambda: train(str(tmp_path)), callbacks=[misfortune])
    assert [(rank, size) for rank, size, _, _ in results] == [(0, 2), (1, 2)]
    pids = [pid for _, _, pid, _ in results]
    assert pids[0] in misfortune.beginners  # the survivor has seen the most, so it is rank 0
    assert pids[0] != misfortune.victim
    assert pids[1] not in misfortune.beginners
    assert results[0][3] == results[1][3]
    nothing_is_left()


def test_all_nodes_of_the_cluster_are_hosts(settings, tmp_path):
    """The way of today: `RayExecutor(min_workers=…)`, on what the cluster has; a function that always fails is told."""
    assert sum(RayHostDiscovery().find_available_hosts_and_slots().values()) == 4
    (tmp_path / "over").touch()
    with RayExecutor(settings, min_workers=2, max_workers=2, use_gpu=True) as executor:
        executor.start(extra_env_vars={"EARLY": "bird"})
        results = executor.run(train, args=[str(tmp_path)])
        assert [(rank, size) for rank, size, _, _ in results] == [(0, 2), (1, 2)]
        seen = executor.run(environment)
        assert len({env["CUDA_VISIBLE_DEVICES"] for env in seen}) == 1
        assert len(seen[0]["CUDA_VISIBLE_DEVICES"].split(",")) == 2
        assert all(b"EARLY=bird" in env["/proc"] for env in seen)
        assert not any("HORA_SECRET" in env for env in seen)
        with pytest.raises(RuntimeError, match="Horovod detected that one or more processes exited") as caught:
            executor.run(lambda: 1 / 0)
        assert "Process name: " in str(caught.value)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(NotImplementedError, match="use run"):
            executor.run_remote(print)


# ---- other drivers ----------------------------------------------------------------------------------------------


def start_driver(text, *arguments, **variables):
    """A program of its own, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
    )


DRIVER = """
    import sys
    import ray
    from horovod.ray import RayExecutor

    ray.init(address=sys.argv[1], log_to_driver=False)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
    executor.start()

    def wait_for_ever():
        import time
        import horovod.torch as hvd
        hvd.init()
        time.sleep(10_000)

    print("runs", flush=True)
    executor.run(wait_for_ever)
"""


def test_a_killed_driver_leaves_nothing(cluster):
    driver = start_driver(DRIVER, cluster.address)
    output = iter(driver.stdout.readline, "")
    assert any(line.startswith("runs") for line in output)
    pids = living_actors()
    assert len(pids) == 2
    driver.kill()
    driver.wait(LIMIT_S)
    nothing_is_left()
    wait_until("the workers' processes have ended", lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_distributed_function_on_ray(settings):
    import hora

    @hora.distributed(num_processes=2, on="ray")
    def place(x):
        import os

        return x, os.environ["HOROVOD_RANK"]

    assert place.distributed(3) == [(3, "0"), (3, "1")]
