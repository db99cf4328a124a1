"""Scenarios with faults or large data on a Spark cluster, as a program: `fault_client.py URL FOLDER SCENARIO …`.

`URL` is that of a master (`spark://…`) or of a Connect server (`sc://…`). Prints one JSON object per scenario: its
result, or {"error": type, "text": message}. Scenarios that wait for a fault from outside write `rank<r>` into FOLDER.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

# Drop a silent executor after 30 seconds instead of Spark's two minutes.
IMPATIENT = {
    "spark.network.timeout": "30s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "3s",
}


def slots_too_few(folder):
    import horovod.spark
    from sparkdl import HorovodRunner

    words = []
    for call in (lambda: HorovodRunner(np=3).run(print), lambda: horovod.spark.run(print, num_proc=3)):
        try:
            call()
        except Exception as error:
            words.append([type(error).__name__, str(error)])
    return words


def two_jobs_at_once(folder):
    """Run two jobs, each of which waits until the other one runs."""
    import horovod.spark

    def main(folder, own, other):
        open(f"{folder}/{own}", "w").close()
        for _ in range(1200):
            if os.path.exists(f"{folder}/{other}"):
                return own
            time.sleep(0.1)

    found = {}

    def job(own, other):
        found[own] = horovod.spark.run(main, args=(folder, own, other), num_proc=1)

    threads = [threading.Thread(target=job, args=pair) for pair in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found.items())


def large_model(folder):
    """Send a model of 200 MB to the ranks and return it."""
    import torch

    from sparkdl import HorovodRunner

    def main(model):
        import torch

        import horovod.torch as hvd

        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        with torch.no_grad():
            model.weight.add_(hvd.allreduce(torch.ones(1), op=hvd.Sum))
        return model

    model = torch.nn.Linear(5000, 10_000, bias=False)
    trained = HorovodRunner(np=2).run(main, model=model)
    return [model.weight.nbytes, bool(torch.equal(trained.weight, model.weight + 2))]


def _waiting(folder):
    open(f"{folder}/rank{os.environ['HOROVOD_RANK']}", "w").close()
    time.sleep(600)


def executor_killed(folder):
    return _loses_an_executor(folder)


def executor_silent(folder):
    return _loses_an_executor(folder)


def _loses_an_executor(folder):
    import horovod.spark
    from sparkdl import HorovodRunner

    try:
        HorovodRunner(np=2).run(_waiting, folder=folder)
    except RuntimeError as error:
        words = str(error)
    for rank in range(2):
        os.remove(f"{folder}/rank{rank}")
    open(f"{folder}/survived", "w").close()
    # A replacement executor registers, and the slots are free again.
    for _ in range(60):
        with contextlib.suppress(Exception):
            return [words, horovod.spark.run(lambda: 1, num_proc=2)]
        time.sleep(1)
    return [words]


def interrupted(folder):
    import horovod.spark
    from sparkdl import HorovodRunner

    try:
        HorovodRunner(np=2).run(_waiting, folder=folder)
    except KeyboardInterrupt:
        return horovod.spark.run(lambda: 1, num_proc=2)


def main() -> None:
    from pyspark.sql import SparkSession

    url, folder, *names = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        if url.startswith("sc://"):
            session = SparkSession.builder.remote(url).getOrCreate()
            stack.callback(session.stop)
        else:
            sys.path.insert(0, str(Path(__file__).parents[2] / "testbeds"))
            from spark_cluster import spark_session

            stack.enter_context(spark_session(url, **{"spark.driver.memory": "2g", **IMPATIENT}))
        for name in names:
            try:
                found = globals()[name](folder)
            except Exception as error:
                found = {"error": type(error).__name__, "text": str(error)[:2000]}
            print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    main()
