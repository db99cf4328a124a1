"""Spark's speculation starts copies of tasks that run for long, and kills a task whose copy has returned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from spark_cluster import StandaloneCluster, cluster_environment

pytestmark = pytest.mark.spark

CLIENT = """
import json, sys, threading, time

sys.path[:0] = [__FOLDER__]
from spark_cluster import spark_session
import horovod.spark
from sparkdl import HorovodRunner


def fixed(until):
    import time, torch, horovod.torch as hvd

    hvd.init()
    while hvd.allreduce(torch.tensor([until - time.time()]), name="left", op=hvd.Min).item() > 0:
        time.sleep(0.1)
    return hvd.size()


def elastic(until):
    import time, torch, horovod.torch as hvd

    hvd.init()
    state = hvd.elastic.TorchState(step=0, sizes=[])

    @hvd.elastic.run
    def train(state):
        state.sizes.append(hvd.size())
        while hvd.allreduce(torch.tensor([until - time.time()]), name="left", op=hvd.Min).item() > 0:
            time.sleep(0.1)
            state.step += 1
            state.commit()

    train(state)
    return state.sizes, state.step > 0


def watch(context, copied, over):
    while not over.wait(0.2):
        for stage in map(context.statusTracker().getStageInfo, context.statusTracker().getActiveStageIds()):
            copied |= {stage.name} if stage and stage.numActiveTasks > stage.numTasks else set()


with spark_session(__URL__, **__SETTINGS__) as session:
    found = {}
    for name, run in (
        ("fixed", lambda until: HorovodRunner(np=2).run(fixed, until=until)),
        ("elastic", lambda until: horovod.spark.run_elastic(elastic, (until,), num_proc=2, max_num_proc=2)),
    ):
        copied, over = set(), threading.Event()
        watcher = threading.Thread(target=watch, args=(session.sparkContext, copied, over))
        watcher.start()
        try:
            found[name] = run(time.time() + 12)
        except RuntimeError as error:
            found[name] = str(error)[-2000:]
        over.set()
        watcher.join()
        found["copies of " + name] = len(copied)
    print("\\nFOUND" + json.dumps(found))
"""
SETTINGS = {
    "spark.speculation": "true",
    "spark.speculation.task.duration.threshold": "3s",
    "spark.speculation.interval": "200ms",
    # Without a barrier stage, which is never speculated about.
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "2",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.executor.cores": "2",
}


def test_copies_of_tasks_leave_the_first_ones_alone(tmp_path):
    folder = str(Path(__file__).parents[2] / "testbeds")
    with StandaloneCluster(num_workers=2, cores=2, several_hosts=True) as cluster:
        program = tmp_path / "client.py"
        code = CLIENT.replace("__FOLDER__", repr(folder)).replace("__URL__", repr(cluster.url))
        program.write_text(code.replace("__SETTINGS__", repr(SETTINGS)))
        done = subprocess.run(
            [sys.executable, str(program)],
            env=cluster_environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert "FOUND" in done.stdout, done.stderr[-4000:]
        found = json.loads(done.stdout.rpartition("FOUND")[2])
        assert cluster.leftovers() == []
    assert found == {"fixed": 2, "copies of fixed": 1, "elastic": [[[2], True]] * 2, "copies of elastic": 1}
