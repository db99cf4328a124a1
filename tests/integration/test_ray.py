"""`horovod.ray` on a real Ray cluster of two nodes: both kinds of executors, deaths, and no leftovers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import psutil
import pytest

pytest.importorskip("ray")

import ray
from keras_function import keras_function
from ray_cluster import RayCluster, living_actors, nothing_is_left
from ray_training import INTERVAL, Misfortune, elastic_settings, train

from hora.errors import JobFailedError
from hora.watch.address import find_pages
from hora.watch.recording import read_run
from hora.watch.terminal import post, snapshots
from horovod.ray import ElasticRayExecutor, RayExecutor
from horovod.ray.elastic_v2 import RayHostDiscovery
from waiting import wait_until

pytestmark = pytest.mark.ray

LIMIT_S = 180.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(by_value=[__name__]) as running:
        yield running


@pytest.fixture
def settings(cluster: RayCluster):
    yield RayExecutor.create_settings(timeout_s=120, placement_group_timeout_s=60)
    nothing_is_left()


class Trainer:
    """Joins the other ranks in its constructor, like a typical executable class."""

    def __init__(self, factor, offset=0):
        import horovod.torch as hvd

        hvd.init()
        self.factor, self.offset = factor, offset

    def sum(self):
        import torch

        import horovod.torch as hvd

        total = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)
        return hvd.rank(), hvd.local_rank(), hvd.cross_rank(), total[0].item() * self.factor + self.offset


def test_a_keras_function(settings):
    pytest.importorskip("tensorflow", reason="needs TensorFlow: make test-tensorflow")
    with RayExecutor(settings, num_workers=2) as executor:
        executor.start()
        results = executor.run(keras_function(), args=[0.05])
    assert [found[0] for found in results] == [2, 2]
    assert results[0][1] == results[1][1]


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
    """Rank 1 raises while the other ranks wait for it."""
    import torch

    import horovod.torch as hvd

    return 1 / 0 if hvd.rank() == 1 else hvd.allreduce(torch.ones(1), name="with rank 1")


def meet_again():
    import torch

    import horovod.torch as hvd

    hvd.shutdown()
    hvd.init()
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_a_dead_worker_ends_the_others_and_is_reported(settings):
    executor = RayExecutor(settings, num_workers=2)
    executor.start(Trainer, [1])
    pids = executor.run(os.getpid)
    with pytest.raises(JobFailedError, match=r"rank 1 died: process \d+ on .* \(Ray node"):
        executor.run(one_is_killed)
    wait_until("the other has ended too", lambda: not any(psutil.pid_exists(pid) for pid in pids))
    with pytest.raises(RuntimeError, match="cannot continue: rank 1 died"):
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


def test_an_executor_has_a_live_page_that_can_stop_it(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("HORA_DASHBOARD", "1")
    monkeypatch.setenv("HORA_RECORD", str(tmp_path / "run.hora"))
    with ThreadPoolExecutor(1) as pool, RayExecutor(settings, num_workers=2) as executor:
        executor.start()
        (page,) = [page for page in find_pages() if page.pid == os.getpid()]
        run = pool.submit(executor.run, trains_for_ever)
        news = iter(snapshots(page))
        seen = next(head for head in _heads(news) if head["state"] == "training" and head["step"] > 20)
        assert [(rank["rank"], rank["state"]) for rank in seen["ranks"]] == [(0, "here"), (1, "here")]
        assert list(seen["hosts"]) == [socket.gethostname()]
        post(page, "/api/stacks", {})
        stacks = next(one["stacks"]["stacks"] for one in news if len(one.get("stacks", {}).get("stacks", ())) == 2)
        assert all("trains_for_ever" in str(stack["threads"][0]) for stack in stacks.values())
        with pytest.raises(ValueError, match="only an elastic job"):
            post(page, "/api/remove", {"rank": 1})
        post(page, "/api/stop", {})
        with pytest.raises(JobFailedError, match="the job was stopped: a user stopped it on its page") as caught:
            run.result(LIMIT_S)
        assert caught.value.exit_code == 143
        with pytest.raises(RuntimeError, match="the executor cannot continue: the job was stopped"):
            executor.run(os.getpid)
    recorded = read_run(tmp_path / "run.hora")
    assert recorded.outcome == "stopped"
    assert recorded.latest_metrics()["loss"] >= 0
    assert not [page for page in find_pages() if page.pid == os.getpid()]


def _heads(news):
    for one in news:
        head = one.get("everything", one).get("head")
        if head is not None:
            yield head


def trains_for_ever():
    import torch

    import hora
    import horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    while True:
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        hora.report(loss=loss)


@pytest.mark.parametrize(("gpus", "distinct", "seen_by_each"), [(1, 1, 2), (2, 1, 4), (0.5, 1, 1)])
def test_workers_see_the_gpus_that_ray_gave_them(settings, gpus, distinct, seen_by_each):
    """The GPUs exist only as Ray resources: a variable shows which ones a worker gets, and that suffices here."""
    with RayExecutor(settings, num_workers=2, use_gpu=True, gpus_per_worker=gpus) as executor:
        executor.start()
        seen = [(env["CUDA_VISIBLE_DEVICES"].split(","), own) for env, own in executor.run(environment_and_gpus)]
    assert len({tuple(visible) for visible, _ in seen}) == distinct
    for rank, (visible, own) in enumerate(seen):
        assert len(visible) == len(set(visible)) == seen_by_each
        assert visible[rank if seen_by_each > 1 else 0] == own[0]  # the one that `set_device(hvd.local_rank())` selects


def environment_and_gpus():
    return dict(os.environ), [str(gpu) for gpu in ray.get_gpu_ids()]


def test_concurrent_jobs_have_separate_gpus(settings):
    pairs = []
    with (
        RayExecutor(settings, min_workers=1, max_workers=1, use_gpu=True, gpus_per_worker=2) as first,
        RayExecutor(settings, num_workers=1, use_gpu=True, gpus_per_worker=2) as second,
        RayExecutor(settings, num_workers=1) as third,
    ):
        for executor in (first, second, third):
            executor.start()
        for executor in (first, second):
            ((env, own),) = executor.run(environment_and_gpus)
            assert env["CUDA_VISIBLE_DEVICES"].split(",") == own
            pairs.append(own)
        ((env, own),) = third.run(environment_and_gpus)
        # Old versions of Ray hide all GPUs from workers without one.
        assert (own, env.get("CUDA_VISIBLE_DEVICES") or None) == ([], os.environ.get("CUDA_VISIBLE_DEVICES") or None)
    assert sorted(pairs[0] + pairs[1]) == ["0", "1", "2", "3"]


def test_the_callers_placement_group_is_used_and_not_removed(settings):
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    caller = ray.remote(num_cpus=0)(Caller).options(scheduling_strategy=strategy).remote()
    assert ray.get(caller.run.remote(2), timeout=LIMIT_S) == (False, [group.id.hex()] * 2)
    with pytest.raises(ValueError, match=r"has room for 2 workers of .*, but 3 are requested"):
        ray.get(caller.run.remote(3), timeout=LIMIT_S)
    ray.kill(caller)
    assert ray.util.placement_group_table(group)["state"] == "CREATED"
    ray.util.remove_placement_group(group)


class Caller:
    """An actor in a placement group that starts an executor."""

    def run(self, num_workers):
        settings = RayExecutor.create_settings(timeout_s=120, placement_group_timeout_s=60)
        with RayExecutor(settings, num_workers=num_workers) as executor:
            executor.start(Trainer, [1])
            return executor.adapter.strategy._created_placement_group, executor.run(group_of_this)


def group_of_this():
    return ray.get_runtime_context().get_placement_group_id()


def test_an_unsatisfiable_request_leaves_nothing(settings):
    settings.placement_group_timeout_s = 2
    with pytest.raises(TimeoutError, match="requested were 100 bundles"):
        RayExecutor(settings, num_workers=100).start()
    with pytest.raises(TimeoutError, match="STRICT_SPREAD"):
        RayExecutor(settings, num_hosts=9).start()


# ---- elastic --------------------------------------------------------------------------------------------------


def kill_one(beginners):
    victim = next(pid for pid, host in beginners.items() if host == "host-1")
    os.kill(victim, signal.SIGKILL)
    return victim


@mock.patch(INTERVAL, 0.1)
def test_a_killed_worker_is_replaced(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("HORA_RECORD", str(tmp_path / "run.hora"))
    settings = elastic_settings({"host-1": 1, "host-2": 1}, min_num_proc=1, max_num_proc=2)
    executor = ElasticRayExecutor(settings, override_discovery=False)
    misfortune = Misfortune(2, kill_one, 2, tmp_path)
    executor.start()
    results = executor.run(lambda: train(str(tmp_path)), callbacks=[misfortune])
    assert [(rank, size) for rank, size, _, _ in results] == [(0, 2), (1, 2)]
    pids = [pid for _, _, pid, _ in results]
    assert pids[0] in misfortune.beginners  # the survivor holds the state, so it becomes rank 0
    assert pids[0] != misfortune.victim
    assert pids[1] not in misfortune.beginners
    assert results[0][3] == results[1][3]
    recorded = read_run(tmp_path / "run.hora")  # the content of its page
    assert {"lost", "world"} <= {event.kind for event in recorded.events}
    assert recorded.outcome == "done"
    nothing_is_left()


def test_all_nodes_of_the_cluster_are_hosts(settings, tmp_path):
    """Uses `RayExecutor(min_workers=…)` on all nodes, and reports a function that always fails."""
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
    """Start a driver program in a separate process."""
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
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), **{sys.argv[2]: 2})
    executor.start()

    def wait_for_ever():
        import time
        import horovod.torch as hvd
        hvd.init()
        time.sleep(10_000)

    print("runs", flush=True)
    executor.run(wait_for_ever)
"""


@pytest.mark.parametrize("size", ["num_workers", "min_workers"])
def test_a_killed_driver_leaves_nothing(cluster, size):
    driver = start_driver(DRIVER, cluster.address, size)
    output = iter(driver.stdout.readline, "")
    assert any(line.startswith("runs") for line in output)
    wait_until("both workers run", lambda: len(living_actors()) >= 2 and all(living_actors()), LIMIT_S)
    pids = living_actors()
    driver.kill()
    driver.communicate(timeout=LIMIT_S)
    nothing_is_left()
    wait_until("the workers' processes have ended", lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_distributed_function_on_ray(settings):
    import hora

    @hora.distributed(num_processes=2, on="ray")
    def place(x):
        import os

        return x, os.environ["HOROVOD_RANK"]

    assert place.distributed(3) == [(3, "0"), (3, "1")]


def reads_its_shard(epochs):
    """Return the rows of this rank in each epoch, and what a collective makes of them."""
    import torch

    import horovod.torch as hvd
    from horovod.ray import get_dataset_shard

    hvd.init()
    shard, found = get_dataset_shard("train"), []
    for _ in range(epochs):
        batches = [batch["id"] for batch in shard.iter_torch_batches(batch_size=5)]
        found.append(sorted(torch.cat(batches).tolist()))
        hvd.allreduce(torch.ones(1), name="epoch")
    hvd.shutdown()
    return found


def asks_for(name):
    from horovod.ray import get_dataset_shard

    return get_dataset_shard(name).materialize().count()


def test_datasets_are_split_among_the_ranks(settings):
    ray.data.DataContext.get_current().enable_progress_bars = False
    with RayExecutor(settings, num_workers=2) as executor:
        executor.start()
        shards = executor.run(reads_its_shard, args=[2], datasets=ray.data.range(40))
        for epoch in range(2):
            assert sorted(row for shard in shards for row in shard[epoch]) == list(range(40))
        assert [len(shard[0]) for shard in shards] == [20, 20]
        both = {"train": ray.data.range(8), "valid": ray.data.range(4)}
        assert executor.run(asks_for, args=["valid"], datasets=both) == [2, 2]
        for given, name, words in (
            (both, "test", "no dataset 'test', only 'train', 'valid'"),
            (None, None, "only none"),
        ):
            with pytest.raises(KeyError, match=words):
                executor.run(asks_for, args=[name], datasets=given)
        with pytest.raises(ValueError, match=r"'train' must be a ray\.data\.Dataset.*list"):
            executor.run(asks_for, args=[None], datasets=[1, 2])
        with pytest.raises(ValueError, match="has 1 rows, too few for 2 ranks"):
            executor.run(asks_for, args=[None], datasets=ray.data.range(1).materialize())
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        executor.run(asks_for, datasets=both)


def opened_ports():
    import horovod.torch as hvd

    def listening():
        return {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"}

    before = listening()  # Ray's own
    hvd.init()
    return listening() - before


def test_driver_and_workers_listen_at_the_ports_that_the_user_allows(settings, monkeypatch):
    monkeypatch.setenv("HORA_PORTS", "20740-20745")
    with RayExecutor(settings, num_workers=2) as executor:
        executor.start(extra_env_vars={"HORA_TRANSPORT": "tcp"})
        first, second = executor.run(opened_ports)
        assert len(first | second) == 2
        assert {executor.adapter.coordinator.rendezvous.port, *first, *second} <= set(range(20740, 20746))
    monkeypatch.setenv("HORA_PORTS", "20740-20742")
    with RayExecutor(settings, num_workers=2) as executor, pytest.raises(ValueError, match="this job needs 4 ports"):
        executor.start(extra_env_vars={"HORA_TRANSPORT": "tcp"})


def test_a_dataset_without_a_core_for_it_is_an_error(settings):
    with RayExecutor(settings, num_workers=4) as executor:
        executor.start()
        with pytest.raises(ValueError, match=r"needs a core that no worker holds, but 4 workers"):
            executor.run(asks_for, args=[None], datasets=ray.data.range(8))


def group_of_worker():
    return ray.util.get_current_placement_group().id.hex(), os.environ["FROM"], os.environ["MORE"]


def test_a_placement_group_and_a_runtime_environment_of_the_user(settings):
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="PACK")
    try:
        with RayExecutor(settings, num_workers=2, placement_group=group) as executor:
            own = {"env_vars": {"FROM": "runtime_env", "MORE": "0"}}
            executor.start(runtime_env=own, extra_env_vars={"MORE": "1"})
            assert executor.run(group_of_worker) == [(group.id.hex(), "runtime_env", "1")] * 2
        assert ray.util.placement_group_table(group)["state"] == "CREATED"  # it is the user's
        with RayExecutor(settings, num_workers=3, placement_group=group) as executor:
            with pytest.raises(ValueError, match="has room for 2 workers"):
                executor.start()
        with RayExecutor(settings, num_workers=2, placement_group=group) as executor:
            with pytest.raises(ValueError, match="runtime_env must be a dict"):
                executor.start(runtime_env="pip")
    finally:
        ray.util.remove_placement_group(group)


def test_what_changes_with_the_workers_is_rejected_for_elastic_executors(settings):
    group = ray.util.placement_group([{"CPU": 1}])
    with pytest.raises(ValueError, match="leave out placement_group"):
        RayExecutor(settings, min_workers=1, placement_group=group)
    ray.util.remove_placement_group(group)
    with RayExecutor(settings, min_workers=1) as executor:
        executor.start()
        with pytest.raises(ValueError, match="a dataset is split once"):
            executor.run(asks_for, args=[None], datasets=ray.data.range(4))
