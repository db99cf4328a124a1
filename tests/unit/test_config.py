"""Environment variables are parsed into values; an invalid value is reported with its variable."""

from __future__ import annotations

from dataclasses import fields

import pytest

from hora.config import EngineConfig


def test_defaults():
    config = EngineConfig.from_env({})
    assert config.fusion_threshold_bytes == 128 * 2**20
    assert config.cache_capacity == 1024
    assert (config.stall_warning_s, config.stall_shutdown_s) == (60.0, 0.0)


def test_values():
    env = {
        "HOROVOD_FUSION_THRESHOLD": "1024",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_TIMELINE": "DYNAMIC",
    }
    config = EngineConfig.from_env(env)
    assert (config.fusion_threshold_bytes, config.stall_warning_s) == (1024, 2.0)
    assert config.dynamic_process_sets
    assert config.timeline == "DYNAMIC"


@pytest.mark.parametrize(
    "variable",
    [item.metadata["variable"] for item in fields(EngineConfig) if item.metadata["parse"] is not str],
)
def test_an_invalid_value_names_the_variable_and_the_value(variable):
    with pytest.raises(ValueError, match=f"{variable} must be .* but it is 'nonsense'"):
        EngineConfig.from_env({variable: "nonsense"})


def test_negative_values_are_rejected():
    with pytest.raises(ValueError, match="HOROVOD_FUSION_THRESHOLD"):
        EngineConfig.from_env({"HOROVOD_FUSION_THRESHOLD": "-1"})
