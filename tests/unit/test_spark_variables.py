"""Variables that the driver forwards, and those it reads."""

from __future__ import annotations

import pytest

from hora.launch.providers.spark.cluster import assigned_gpus, forwarded_variables, start_timeout_s


def test_the_runtimes_settings_are_forwarded_and_nothing_else():
    environ = {"HOROVOD_TIMELINE": "t", "NCCL_DEBUG": "INFO", "PATH": "p", "HOROVOD_RANK": "3", "HORA_SECRET_FILE": "f"}
    assert forwarded_variables(environ) == {"HOROVOD_TIMELINE": "t", "NCCL_DEBUG": "INFO"}


def test_start_timeout():
    assert start_timeout_s({}) == 600
    assert start_timeout_s({"HOROVOD_SPARK_START_TIMEOUT": "5"}) == 5
    for nonsense in ("soon", "0", "-1"):
        with pytest.raises(ValueError, match=f"HOROVOD_SPARK_START_TIMEOUT.*{nonsense}"):
            start_timeout_s({"HOROVOD_SPARK_START_TIMEOUT": nonsense})


def test_assigned_gpus():
    assert assigned_gpus({}) == []
    assert assigned_gpus({"HORA_SPARK_GPUS": ""}) == []
    assert assigned_gpus({"HORA_SPARK_GPUS": "2,0"}) == ["2", "0"]
