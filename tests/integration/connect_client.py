"""Spark Connect scenarios as a program: `connect_client.py sc://host:port|local[n] FOLDER SCENARIO …`.

Runs in its own process, because a process with a classic session cannot have a Connect session. Prints one JSON object
per scenario: its name -> its result, or {"error": type, "text": message}.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time

import numpy as np


def runner(spark, folder):
    from sparkdl import HorovodRunner

    def main(base):
        import torch

        import horovod.torch as hvd
        from sparkdl.horovod import log_to_driver

        hvd.init()
        log_to_driver(f"hello from rank {hvd.rank()}")
        print("not shown")
        return base + hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item(), hvd.size()

    return HorovodRunner(np=2).run(main, base=10)


def warm(spark, folder):
    """Check that forked ranks see no changes that a UDF made in Spark's Python workers, and that later jobs find
    modules preloaded that the first job did not use.
    """
    from sparkdl import HorovodRunner

    def vandal(batches):
        sys.modules["left_behind"] = sys
        os.environ["LEFT_BEHIND"] = str(os.getpid())
        yield from batches

    def witness():
        import torch

        import horovod.torch as hvd

        hvd.init()
        with open("/proc/self/cmdline") as file:
            forked = "hora.launch.providers.spark.warm_pool" in file.read()
        left = "left_behind" in sys.modules or "LEFT_BEHIND" in os.environ
        loaded = "torch._dynamo" in sys.modules
        torch.optim.SGD([torch.ones(1)], lr=1.0)
        return hvd.allgather_object((forked, left, loaded, torch.initial_seed()))

    spark.range(0, 8, 1, 2).mapInArrow(vandal, "id long").collect()
    found = [told for _ in range(2) for told in HorovodRunner(np=2).run(witness)]
    return [told[:3] for told in found], len({told[3] for told in found})


def files(spark, folder):
    """Send a module and a file that only the client has."""
    from sparkdl import HorovodRunner

    os.makedirs(f"{folder}/files")
    module, words = f"{folder}/files/lone_module.py", f"{folder}/files/words.txt"
    for path, text in ((module, "value = 7"), (words, "hello")):
        with open(path, "w") as file:
            file.write(text)
    spark.addArtifacts(words, file=True)

    def main():
        import lone_module
        from pyspark import SparkFiles

        with open(SparkFiles.get("words.txt")) as file:
            return lone_module.value, file.read()

    return HorovodRunner(np=2, py_files=module).run(main)


def failure(spark, folder):
    from sparkdl import HorovodRunner

    def main():
        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("no such shard")
        time.sleep(60)

    try:
        HorovodRunner(np=2).run(main)
    except RuntimeError as error:
        return [type(error).__name__, str(error), type(error.__cause__).__name__, str(error.__cause__)]


def run(spark, folder):
    import horovod.spark

    out = io.StringIO()

    def fn(text):
        print(text, flush=True)
        return os.environ["HOROVOD_RANK"], os.environ["GIVEN"], b"x" * 600_000

    results = horovod.spark.run(fn, args=("a line",), env={"GIVEN": "1"}, stdout=out)
    return (
        [result[:2] for result in results],
        [len(result[2]) for result in results],
        sorted(out.getvalue().split("\n")),
    )


def large(spark, folder):
    """Send a call larger than a query message, and return a value larger than one answer."""
    import horovod.spark

    data = np.arange(1_200_000, dtype="float64")
    found = horovod.spark.run(lambda values: (float(values.sum()), values), args=(data,), num_proc=1)
    return bool(found[0][0] == data.sum()), bool((found[0][1] == data).all())


def too_few(spark, folder):
    import horovod.spark
    from sparkdl import HorovodRunner

    words = []
    for call in (lambda: HorovodRunner(np=3).run(print), lambda: horovod.spark.run(print, num_proc=3)):
        try:
            call()
        except Exception as error:
            words.append([type(error).__name__, str(error)])
    return words


def elastic(spark, folder):
    import horovod.spark

    try:
        horovod.spark.run_elastic(print)
    except ValueError as error:
        return str(error)


def estimator(spark, folder):
    import torch
    from pyspark.ml.linalg import Vectors

    from horovod.spark.common.store import Store
    from horovod.spark.torch import TorchEstimator, TorchModel

    x = np.random.default_rng(0).normal(size=(20, 2))
    rows = [(Vectors.dense(row), float(row[0] - 2 * row[1]), int(row[0] > 0)) for row in x]
    frame = spark.createDataFrame(rows, ["x", "y", "positive"]).coalesce(1)
    model = torch.nn.Linear(2, 1)
    fitted = TorchEstimator(
        store=Store.create(os.path.join(folder, "store"), save_runs=False),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        epochs=2,
        partitions_per_process=1,
        verbose=0,
    ).fit(frame)
    fitted.save(os.path.join(folder, "model"))
    fitted.write().overwrite().save(os.path.join(folder, "model"))
    predicted = TorchModel.load(os.path.join(folder, "model")).transform(frame).orderBy("y").collect()
    expected = fitted.getModel()(torch.tensor(np.array([row.x.toArray() for row in predicted]), dtype=torch.float32))
    same = np.allclose([row.y__output for row in predicted], expected.detach().reshape(-1).numpy(), atol=1e-5)
    return len(fitted.getHistory()), len(predicted), bool(same)


def converter(spark, folder):
    import horovod.spark
    from hora.data.converter import make_spark_converter

    spark.conf.set("petastorm.spark.converter.parentCacheDirUrl", f"file://{folder}/cache")
    made = make_spark_converter(spark.range(10).selectExpr("id", "id / 2D as half"))

    def fn(made):
        import horovod.torch as hvd

        hvd.init()
        with made.make_torch_dataloader(num_epochs=1, cur_shard=hvd.rank(), shard_count=hvd.size()) as batches:
            return sorted(int(value) for batch in batches for value in batch["id"])

    shards = horovod.spark.run(fn, args=(made,), num_proc=2)
    found = sorted(number for shard in shards for number in shard)
    again = (
        make_spark_converter(spark.range(10).selectExpr("id", "id / 2D as half")).cache_dir_url == made.cache_dir_url
    )
    made.delete()
    return found, len(made), again


def workers(spark, folder):
    """Cover exit codes, output, stopping one worker, and launching more workers than there are slots."""
    import warnings

    from hora import workers

    names = ("CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "SPARK_TEST_CLUSTER", "MINE")
    code = f"import os, sys\nprint([os.environ.get(name) for name in {names}])\nsys.exit(int(os.environ['MINE']))"
    # A cluster inside this process has no other machine, so Spark must be requested explicitly.
    on = {"backend": "spark"} if "SPARK_LOCAL_REMOTE" in os.environ else {}
    launched = [workers.launch_workers(1, 1, 1, code=code, env={"MINE": str(code_)}, **on)[0] for code_ in (0, 3)]
    ended = workers.await_workers(launched, timeout_seconds=120)
    told = [
        [worker["status"], worker["exit_code"], worker["ip_address"]] for worker in ended["workers"] + ended["failures"]
    ]
    own = [
        worker["log_tail"][-1].startswith(f"['{worker['id']}', '127.0.0.1', 'spark-cluster-")
        for worker in ended["workers"]
    ]
    with open("job.py", "w") as file:
        file.write("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    running = workers.launch_workers(2, 1, 1, script="job.py", **on)
    up = workers.await_workers(running, wait_for_completion=False, timeout_seconds=120)["workers"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (refused,) = workers.launch_workers(1, 1, 1, code="print()", **on)
    workers.stop_workers(running[0])
    states = [worker["status"] for worker in workers.list_workers()]
    workers.stop_workers()
    return told, own, len(up), refused["message"], states


def wait_for_interrupt(spark, folder):
    from sparkdl import HorovodRunner

    def main(path):
        open(f"{path}/rank{os.environ['HOROVOD_RANK']}", "w").close()
        time.sleep(600)

    try:
        HorovodRunner(np=2).run(main, path=folder)
    except KeyboardInterrupt:
        import horovod.spark

        return horovod.spark.run(lambda: 1, num_proc=2)  # the slots are free again


def main() -> None:
    from pyspark.sql import SparkSession

    url, folder, *names = sys.argv[1:]
    spark = SparkSession.builder.remote(url).getOrCreate()
    for name in names:
        began = time.monotonic()
        try:
            found = globals()[name](spark, folder)
        except Exception as error:
            found = {"error": type(error).__name__, "text": str(error)[:500]}
        print(json.dumps({name: found, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    spark.stop()


if __name__ == "__main__":
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    main()
