"""Environment variables that the driver forwards, and those it reads."""

from __future__ import annotations

import pytest
import torch

from hora.launch.providers.spark.cluster import assigned_gpus, forwarded_variables, seconds_of


def test_only_the_runtimes_settings_are_forwarded(monkeypatch):
    before = forwarded_variables()
    settings = {"HOROVOD_TIMELINE": "t", "NCCL_DEBUG": "INFO"}
    for name, value in {**settings, "PATH": "p", "HOROVOD_RANK": "3", "HORA_SECRET_FILE": "f"}.items():
        monkeypatch.setenv(name, value)
    assert forwarded_variables() == {**before, **settings}


def test_start_timeout(monkeypatch):
    assert seconds_of("HOROVOD_SPARK_START_TIMEOUT") == 600
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "5")
    assert seconds_of("HOROVOD_SPARK_START_TIMEOUT") == 5
    for nonsense in ("soon", "0", "-1"):
        monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", nonsense)
        with pytest.raises(ValueError, match=f"HOROVOD_SPARK_START_TIMEOUT.*{nonsense}"):
            seconds_of("HOROVOD_SPARK_START_TIMEOUT")


def test_assigned_gpus(monkeypatch):
    assert assigned_gpus() == []
    monkeypatch.setenv("HORA_SPARK_GPUS", "2,0")
    assert assigned_gpus() == ["2", "0"]


@pytest.mark.parametrize(("gpus", "own", "number"), [("1,3", "0", 1), ("1,3", "1", 2), ("", "0", 2), ("MIG-1", "0", 2)])
def test_a_rank_trains_on_the_gpu_of_its_task_or_of_its_local_rank(monkeypatch, gpus, own, number):
    from hora.spark.estimator import training

    monkeypatch.setenv("HORA_SPARK_GPUS", gpus)
    monkeypatch.setenv("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", own)
    for name, value in (("is_available", True), ("device_count", 4), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(training.hvd, "local_rank", lambda: 2)
    monkeypatch.setattr(training.hvd, "allgather_object", lambda kind: [kind])
    assert training.rank_device(True) == torch.device("cuda", number)
