"""Ray's own trainers and Ray Client, each in a process with a separate Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("ray")

pytestmark = pytest.mark.ray

LIMIT_S = 400.0


def run_program(text: str, *arguments: str, **variables: str) -> str:
    """Run a program, which must succeed, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **variables},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


EXAMPLE = """
    import sys, textwrap
    import ray
    from ray.train.horovod import HorovodTrainer

    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100_000_000)
    documented = HorovodTrainer.__doc__.partition("Example:")[2].partition("Args:")[0]
    example = textwrap.dedent(documented.partition(":skipif: True")[2])
    assert "hvd.DistributedOptimizer" in example
    exec(compile(example, "example", "exec"))
    print("epoch", result.metrics["epoch"], "loss", result.metrics["loss"], sorted(os.listdir(result.checkpoint.path)))
"""


def test_the_example_of_rays_horovod_trainer_runs_verbatim(tmp_path):
    pytest.importorskip("pyarrow")
    said = run_program(EXAMPLE, RAY_TRAIN_V2_ENABLED="0", HOME=str(tmp_path))
    assert "epoch 2 loss" in said
    assert "['model.pt']" in said


RESTARTED = """
    import os, sys
    import ray
    from ray import train
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.horovod import HorovodTrainer

    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100_000_000)
    folder = sys.argv[1]

    def loop(config):
        import torch
        import horovod.torch as hvd

        hvd.init()
        total = hvd.allreduce(torch.ones(1) * config["value"], op=hvd.Sum).item()
        marker = os.path.join(folder, "died")
        if hvd.rank() == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(1)
        train.report({"total": hvd.allreduce(torch.ones(1), op=hvd.Sum).item() + total, "rank": hvd.rank()})
        assert "HORA_SECRET" not in os.environ

    trainer = HorovodTrainer(
        loop,
        train_loop_config={"value": 10},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    )
    print("total", trainer.fit().metrics["total"])
"""


def test_ray_restarts_a_horovod_trainer(tmp_path):
    said = run_program(RESTARTED, str(tmp_path), RAY_TRAIN_V2_ENABLED="0")
    assert "total 22.0" in said
    assert (tmp_path / "died").exists()


TODAYS = """
    import sys
    import ray
    from ray import train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100_000_000)

    def loop():
        import torch
        import horovod.torch as hvd

        hvd.init()
        train.report({"total": hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), "size": hvd.size()})

    scaling = ScalingConfig(num_workers=2)
    print(TorchTrainer(loop, scaling_config=scaling, run_config=RunConfig(storage_path=sys.argv[1])).fit().metrics)
"""


def test_a_torch_trainer_of_current_ray_can_use_horovod(tmp_path):
    assert "'total': 2.0" in run_program(TODAYS, str(tmp_path))


CLIENT = """
    import os
    import ray
    from ray.util.client.ray_client_helpers import ray_start_client_server
    from horovod.ray import RayExecutor, ray_logger

    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

    def connect(job_config=None, **rest):
        from ray._private.client_mode_hook import disable_client_hook
        with disable_client_hook():
            return ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100_000_000, job_config=job_config)

    class Model:
        def __init__(self, start):
            import horovod.torch as hvd
            hvd.init()
            self.value = start

    def total(model):
        import torch
        import horovod.torch as hvd
        ray_logger.log({"rank": hvd.rank()})
        return hvd.allreduce(torch.ones(1) * model.value, op=hvd.Sum).item()

    with ray_start_client_server(ray_connect_handler=connect):
        assert ray.util.client.ray.is_connected()
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=3)
        executor.start(executable_cls=Model, executable_args=[2])
        logged = []
        assert executor.execute(total, callbacks=[logged.append]) == [6.0] * 3
        assert sorted(entry["rank"] for entry in logged) == [0, 1, 2]
        assert executor.execute_single(lambda model: model.value) == 2
        assert ray.get(executor.run_remote(lambda: os.environ["HOROVOD_RANK"])) == ["0", "1", "2"]
        assert executor.run(lambda x, y: x + y, args=[1], kwargs={"y": 2}) == [3] * 3
        executor.shutdown()
        elastic = RayExecutor(RayExecutor.create_settings(timeout_s=120), min_workers=2, max_workers=2)
        elastic.start()

        def size():
            import horovod.torch as hvd
            hvd.init()
            return hvd.size()

        assert elastic.run(size) == [2, 2]
        elastic.shutdown()
        print("all is well", ray.available_resources().get("CPU"))
"""


def test_executors_through_ray_client():
    """Three workers fill three cores: the actor that represents the client in the cluster needs none."""
    assert "all is well" in run_program(CLIENT)
