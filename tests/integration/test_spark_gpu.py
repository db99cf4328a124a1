"""Spark's GPU resources reach the ranks. The GPUs are made up: Spark only hands out their addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from spark_cluster import StandaloneCluster

pytestmark = pytest.mark.spark

DRIVER = textwrap.dedent("""
    import json, sys
    sys.path.insert(0, sys.argv[2])
    from spark_cluster import spark_session
    from sparkdl import HorovodRunner
    import horovod.spark

    def devices():
        import os
        from horovod.spark.task import get_available_devices
        return get_available_devices(), os.environ.get("CUDA_VISIBLE_DEVICES")

    gpus = {"spark.executor.resource.gpu.amount": "2", "spark.task.resource.gpu.amount": "1",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "10s"}
    with spark_session(sys.argv[1], **gpus):
        ours = HorovodRunner(np=2).run(devices)
        upstream = horovod.spark.run(devices, num_proc=2)
        try:
            HorovodRunner(np=3).run(devices)
        except ValueError as error:
            problem = str(error)
    print("RESULT", json.dumps([ours, upstream, problem]))
""")


def test_ranks_see_the_gpus_of_their_host_by_local_rank(tmp_path):
    discovery = tmp_path / "gpus.sh"
    discovery.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["5", "7"]}'\n""")
    discovery.chmod(0o755)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    resources = {
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(discovery),
    }
    with StandaloneCluster(num_workers=1, cores=4, settings=resources) as cluster:
        done = subprocess.run(
            [sys.executable, str(script), cluster.url, os.path.dirname(__file__)],
            capture_output=True,
            text=True,
            timeout=150,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    ours, upstream, problem = json.loads(line.removeprefix("RESULT"))
    # The first task of the host (rank 0) has one of the two; both are visible, its own first.
    assert ours[0] in (["5"], ["7"])
    assert ours[1] == ("5,7" if ours[0] == ["5"] else "7,5")
    # Horovod's own runner leaves the devices alone and tells the addresses.
    assert sorted(own for own, _ in upstream) == [["5"], ["7"]]
    assert [visible for _, visible in upstream] == [None, None]
    assert "has 2" in problem
    assert "spark.task.resource.gpu.amount=1" in problem
