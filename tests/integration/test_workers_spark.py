"""Workers as tasks of a real Spark cluster: the same functions and results, and released slots."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest

from hora import workers
from hora.launch.providers.spark.cluster import count_slots
from hora.workers import api
from waiting import wait_until

pytestmark = pytest.mark.spark

FOR_EVER = "import time\nprint('up', flush=True)\ntime.sleep(600)"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    workers.stop_workers()
    api._close(os.getpid())


def launch(n=2, code=FOR_EVER, cpu=1, memory=1, **more):
    return workers.launch_workers(n, cpu=cpu, memory=memory, code=code, **more)


def slots_are_free(spark):
    context = spark.sparkContext
    # Wait for a lost executor's replacement first: Spark retries a barrier stage that does not fit only every 15 s.
    wait_until("the cluster has its two slots back", lambda: count_slots(context) >= 2)
    return context.parallelize(range(2), 2).barrier().mapPartitions(lambda part: list(part)).count() == 2


def test_workers_run_in_the_cluster_and_report_their_exit(spark, spark_cluster, capfd):
    names = ("CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "CDSW_MASTER_IP", "SPARK_TEST_CLUSTER", "MINE")
    code = f"import os, json\nprint(json.dumps([os.environ.get(name) for name in {names}]))"
    launched = launch(code=code, env={"MINE": "yes"})
    assert {worker["status"] for worker in launched} == {"scheduling"}
    result = workers.await_workers(launched, timeout_seconds=90)
    assert result["failures"] == []
    for worker, asked in zip(result["workers"], launched, strict=True):
        assert (worker["id"], worker["exit_code"], worker["ip_address"]) == (asked["id"], 0, "127.0.0.1")
        told = json.loads(worker["log_tail"][-1])
        assert told == [worker["id"], "127.0.0.1", "127.0.0.1", spark_cluster.name, "yes"]
    assert f"[{launched[1]['id']}]<stdout>:" in capfd.readouterr().out
    assert slots_are_free(spark)
    assert spark_cluster.leftovers() == []


def test_stopping_a_worker_frees_its_slot(spark, spark_cluster):
    launched = launch()
    result = workers.await_workers(launched, wait_for_completion=False, timeout_seconds=90)
    assert [worker["ip_address"] for worker in result["workers"]] == ["127.0.0.1"] * 2
    with pytest.warns(UserWarning, match="a Spark task slot was requested, but 0 of 2 are free"):
        (refused,) = launch(1)
    assert "id" not in refused
    (stopped,) = workers.stop_workers(launched[0])
    assert stopped.status_code == 204
    assert [worker["status"] for worker in workers.list_workers()] == ["stopped", "running"]
    Path("job.py").write_text("import sys\nprint('script', sys.argv, __name__)\nsys.exit(3)\n")
    (failed,) = workers.await_workers(launch(1, script="job.py"), timeout_seconds=90)["failures"]
    assert (failed["status"], failed["exit_code"]) == ("failed", 3)
    assert failed["log_tail"] == [f"script [{str(Path('job.py').resolve())!r}] __main__"]
    workers.stop_workers()
    assert [worker["status"] for worker in workers.list_workers()] == ["stopped", "stopped", "failed"]
    assert slots_are_free(spark)
    assert spark_cluster.leftovers() == []


def test_excessive_requests_are_rejected_with_an_explanation(spark):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second, third = launch(3, code="print('hello')")
        assert ("id" in first, "id" in second, "id" in third) == (True, True, False)
        assert third["message"] == "a Spark task slot was requested, but 0 of 2 are free"
        assert len(workers.await_workers([first, second], timeout_seconds=90)["workers"]) == 2
        assert all("id" not in worker for worker in launch(3, all_or_nothing=True))
        (cores,) = launch(1, cpu=2)
        (gpus,) = launch(1, nvidia_gpu=1)
    assert cores["message"] == "2 CPU cores were requested, but a Spark task here has 1 (spark.task.cpus)"
    assert "1 GPUs were requested, but a Spark task here has 0" in gpus["message"]
    assert len(workers.list_workers()) == 2


def test_workers_that_wait_for_slots_can_be_stopped(spark, tmp_path):
    held = launch(1)
    workers.await_workers(held, wait_for_completion=False, timeout_seconds=90)
    api._own[1].session._spark[-1][1]._held.clear()  # as if another user's job held the slot
    waiting = launch(2)
    late = workers.await_workers(waiting, wait_for_completion=False, timeout_seconds=1)
    assert {worker["status"] for worker in late["failures"]} == {"scheduling"}
    assert {worker["ip_address"] for worker in late["failures"]} == {"unknown"}
    workers.stop_workers(*waiting)
    assert [worker["status"] for worker in workers.list_workers()] == ["running", "stopped", "stopped"]
    workers.stop_workers()
    assert slots_are_free(spark)


def test_a_lost_executor_ends_only_its_workers(spark, spark_cluster):
    launched = launch()
    workers.await_workers(launched, wait_for_completion=False, timeout_seconds=90)
    spark_cluster.executors()[0].kill()

    def states():
        return sorted(worker["status"] for worker in workers.list_workers())

    wait_until("a worker has failed", lambda: "failed" in states())
    (failed,) = [worker for worker in workers.list_workers() if worker["status"] == "failed"]
    assert "executor was lost" in failed["message"]
    assert states() == ["failed", "running"]
    workers.stop_workers()
    assert slots_are_free(spark)
    assert spark_cluster.leftovers() == []


def test_the_local_backend_can_be_requested(spark):
    (worker,) = launch(1, code="import os; print(os.environ.get('SPARK_TEST_CLUSTER'))", backend="local")
    (ended,) = workers.await_workers(worker)["workers"]
    assert ended["log_tail"] == ["None"]
    assert ended["ip_address"].startswith("127.0.1.")
    with pytest.raises(ValueError, match="backend must be auto, local or spark, but it is 'yarn'"):
        launch(1, backend="yarn")
