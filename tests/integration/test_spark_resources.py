"""Clusters with GPUs, and clusters that start executors on demand.

The GPUs are fictitious: Spark only assigns their addresses. One driver runs both sessions one after the other, because
starting a driver takes longer than the jobs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from spark_cluster import StandaloneCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow]  # starts another cluster

WITH_GPUS = {
    "spark.executor.resource.gpu.amount": "2",
    "spark.task.resource.gpu.amount": "1",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "10s",
}
ON_DEMAND = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.maxExecutors": "1",
    "spark.executor.cores": "2",
    "spark.executor.pyspark.memory": "16g",
}
DRIVER = """
    import json, os, sys
    sys.path.insert(0, {folder!r})
    from spark_cluster import spark_session
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
    from sparkdl import HorovodRunner
    import horovod.spark

    def devices():
        import os
        from horovod.spark.task import get_available_devices
        return get_available_devices(), os.environ.get("CUDA_VISIBLE_DEVICES")

    def size():
        import os, resource
        return os.environ["HOROVOD_SIZE"], resource.getrlimit(resource.RLIMIT_AS)[0] >> 30

    def refusal(function, np=3, **given):
        try:
            HorovodRunner(np=np, **given).run(function)
        except ValueError as error:
            return str(error)

    with spark_session({url!r}, keep_java=True, **{with_gpus!r}):
        gpus = HorovodRunner(np=2).run(devices), horovod.spark.run(devices, num_proc=2), refusal(devices)
        asked = TaskResourceRequests().cpus(2).resource("gpu", 2)
        both = ResourceProfileBuilder().require(asked).build
        of_one = HorovodRunner(np=1, resources=both).run(devices)
        profiles = of_one, refusal(devices, np=2, resources=both), refusal(devices, resources={{"gpu": 2}})
    with spark_session({url!r}, **{on_demand!r}):
        demand = HorovodRunner(np=2).run(size), refusal(size)
    print("RESULT", json.dumps([gpus, demand, profiles]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The driver's results: with GPUs, and with executors on demand."""
    folder = tmp_path_factory.mktemp("resources")
    discovery = folder / "gpus.sh"
    discovery.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["5", "7"]}'\n""")
    discovery.chmod(0o755)
    resources = {
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(discovery),
    }
    with StandaloneCluster(num_workers=1, cores=4, settings=resources) as cluster:
        facts = {"folder": str(Path(__file__).parents[2] / "testbeds"), "url": cluster.url}
        script = folder / "driver.py"
        script.write_text(textwrap.dedent(DRIVER).format(**facts, with_gpus=WITH_GPUS, on_demand=ON_DEMAND))
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=400, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


def test_ranks_see_the_gpus_of_their_host_by_local_rank(found):
    ours, upstream, problem = found[0]
    # The first task of the host (rank 0) has one of the two GPUs; both are visible, its own first.
    assert ours[0] in (["5"], ["7"])
    assert ours[1] == ("5,7" if ours[0] == ["5"] else "7,5")
    # Like Horovod's runner, `horovod.spark.run` does not set the devices but reports their addresses.
    assert sorted(own for own, _ in upstream) == [["5"], ["7"]]
    assert [visible for _, visible in upstream] == [None, None]
    assert "has 2" in problem
    assert "spark.task.resource.gpu.amount=1" in problem


def test_executors_on_demand(found):
    (size, limit), problem = found[1]
    assert size == "2"
    assert limit == 8  # GiB: half of spark.executor.pyspark.memory
    assert "np=3" in problem
    assert "spark.dynamicAllocation.maxExecutors=1" in problem


def test_a_resource_profile_gives_a_task_several_gpus(found):
    (own, visible), too_few, wrong = found[2]
    assert own == ["5", "7"]
    assert visible == "5,7"
    assert "np=2" in too_few
    assert "has 1 (each task needs cpus=2 and gpu=2)" in too_few
    assert "resources must be a pyspark.resource.ResourceProfile, but it is {'gpu': 2}" in wrong
