"""When freed memory is kept by the process."""

from __future__ import annotations

import pytest

from hora.config import EngineConfig


@pytest.mark.parametrize(
    ("variables", "keeps"),
    [
        ({}, True),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_shstk=off"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "131072", "HORA_KEEP_FREED_MEMORY": "1"}, True),
    ],
)
def test_settings_of_the_users_own_are_left_alone(variables: dict[str, str], keeps: bool) -> None:
    assert EngineConfig.from_env(variables).keep_freed_memory is keeps
