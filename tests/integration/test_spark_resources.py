"""Clusters with GPUs, and clusters that start executors on demand.

The GPUs are made up: Spark only hands out their addresses. Each test has a driver of its own, because a process has
one SparkSession.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from spark_cluster import StandaloneCluster

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    discovery = tmp_path_factory.mktemp("discovery") / "gpus.sh"
    discovery.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["5", "7"]}'\n""")
    discovery.chmod(0o755)
    resources = {
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(discovery),
    }
    with StandaloneCluster(num_workers=1, cores=4, settings=resources) as cluster:
        yield cluster


def drive(tmp_path, cluster, settings, body):
    """What `body` leaves in `result`, run by a driver with a session of these settings."""
    script = tmp_path / "driver.py"
    head = f"""
    import json, sys
    sys.path.insert(0, {os.path.dirname(__file__)!r})
    from spark_cluster import spark_session
    from sparkdl import HorovodRunner
    import horovod.spark

    with spark_session({cluster.url!r}, **{settings!r}):
    """
    script.write_text(
        textwrap.dedent(head)
        + textwrap.indent(textwrap.dedent(body), "    ")
        + '\nprint("RESULT", json.dumps(result))\n'
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


def test_ranks_see_the_gpus_of_their_host_by_local_rank(tmp_path, cluster):
    settings = {
        "spark.executor.resource.gpu.amount": "2",
        "spark.task.resource.gpu.amount": "1",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "10s",
    }
    ours, upstream, problem = drive(
        tmp_path,
        cluster,
        settings,
        """
        def devices():
            import os
            from horovod.spark.task import get_available_devices
            return get_available_devices(), os.environ.get("CUDA_VISIBLE_DEVICES")

        ours = HorovodRunner(np=2).run(devices)
        upstream = horovod.spark.run(devices, num_proc=2)
        try:
            HorovodRunner(np=3).run(devices)
        except ValueError as error:
            result = [ours, upstream, str(error)]
        """,
    )
    # The first task of the host (rank 0) has one of the two; both are visible, its own first.
    assert ours[0] in (["5"], ["7"])
    assert ours[1] == ("5,7" if ours[0] == ["5"] else "7,5")
    # Horovod's own runner leaves the devices alone and tells the addresses.
    assert sorted(own for own, _ in upstream) == [["5"], ["7"]]
    assert [visible for _, visible in upstream] == [None, None]
    assert "has 2" in problem
    assert "spark.task.resource.gpu.amount=1" in problem


def test_executors_on_demand(tmp_path, cluster):
    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.maxExecutors": "1",
        "spark.executor.cores": "2",
    }
    size, problem = drive(
        tmp_path,
        cluster,
        settings,
        """
        def size():
            import os
            return os.environ["HOROVOD_SIZE"]

        value = HorovodRunner(np=2).run(size)
        try:
            HorovodRunner(np=3).run(size)
        except ValueError as error:
            result = [value, str(error)]
        """,
    )
    assert size == "2"
    assert "np=3" in problem
    assert "spark.dynamicAllocation.maxExecutors=1" in problem
