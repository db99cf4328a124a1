"""`TorchDistributor` on a real Spark cluster. All but one of the tests pass with pyspark's class, the reference."""

from __future__ import annotations

import textwrap

import pytest
from pyspark.ml.torch import distributor

import hora.spark
from hora.errors import JobFailedError

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]


@pytest.fixture(
    params=[
        pytest.param(hora.spark.TorchDistributor, id="hora"),
        pytest.param(distributor.TorchDistributor, id="pyspark", marks=pytest.mark.slow),
    ]
)
def kind(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["local", "on-spark"])
def two(kind, request):
    """Two processes, on the driver's machine or in tasks."""
    return kind(num_processes=2, local_mode=request.param, use_gpu=False)


def test_run_returns_rank_0s_value(two):
    def train(rate, *, scale):
        import os

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        places = [None] * dist.get_world_size()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CUDA_VISIBLE_DEVICES")
        dist.all_gather_object(places, [os.environ.get(name) for name in names])
        dist.destroy_process_group()
        return total.item() * rate * scale, places

    value, places = two.run(train, 0.5, scale=2)
    assert value == 3.0
    if two.local_mode:
        assert [place[:4] for place in places] == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]
    else:  # each task is a node
        assert places == [["0", "2", "0", "1", "0", ""], ["1", "2", "0", "1", "1", ""]]


def test_a_file_runs_with_its_arguments_and_returns_none(two, tmp_path):
    (tmp_path / "beside.py").write_text("OFFSET = 10\n")
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        import beside
        import torch
        import torch.distributed as dist

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            total = torch.tensor([beside.OFFSET + dist.get_rank()])
            dist.all_reduce(total)
            with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
                file.write(f"{total.item()} {sys.argv[2]}")
            dist.destroy_process_group()
        """)
    )
    assert two.run(str(script), tmp_path / "out", "--rate=0.5") is None
    assert [(tmp_path / f"out.{rank}").read_text() for rank in range(2)] == ["21 --rate=0.5"] * 2
    local = type(two)(1, local_mode=True, use_gpu=False)
    with pytest.raises(ValueError, match="does not support key-word"):
        local.run(str(script), rate=0.5)


def test_a_function_that_fails_is_a_runtime_error_with_its_traceback(two):
    if type(two) is distributor.TorchDistributor:
        pytest.skip("pyspark's own class returns, or raises an error of the stage, if rank 1 raises one")

    def train():
        import os

        if os.environ["RANK"] == "1":
            raise KeyError("no such column")

    with pytest.raises(Exception, match="no such column") as caught:
        two.run(train)
    assert isinstance(caught.value, JobFailedError)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)


def test_bad_arguments(kind):
    with pytest.raises(ValueError, match=r"num_procc?esses has to be a positive integer"):
        kind(num_processes=0, use_gpu=False)
    with pytest.raises(RuntimeError, match="GPUs were unable to be found on the driver"):
        kind(num_processes=1, local_mode=True, use_gpu=True)
    with pytest.raises(RuntimeError, match=r"'spark.task.resource.gpu.amount' was unset"):
        kind(num_processes=1, local_mode=False, use_gpu=True)


def test_errors_before_the_job_starts():
    with pytest.raises(ValueError, match="train_object must be a function or the path of a file"):
        hora.spark.TorchDistributor(2, local_mode=True, use_gpu=False).run(7)
    with pytest.raises(ValueError, match=r"np=3 .* has 2"):
        hora.spark.TorchDistributor(3, local_mode=False, use_gpu=False).run(print)


def test_gloo_can_be_replaced_in_the_tasks(monkeypatch):
    monkeypatch.setenv("HORA_REPLACE_GLOO", "1")

    def train():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        kind = type(dist.group.WORLD).__name__
        dist.destroy_process_group()
        return kind

    assert hora.spark.TorchDistributor(2, local_mode=False, use_gpu=False).run(train) == "HoraProcessGroup"
