"""The condition under which the process keeps freed memory."""

from __future__ import annotations

import pytest

from hora.config import EngineConfig
from hora.launch.environment import allocator_variables


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
def test_the_users_own_settings_are_kept(variables: dict[str, str], keeps: bool) -> None:
    assert EngineConfig.from_env(variables).keep_freed_memory is keeps


@pytest.mark.parametrize(
    ("machine", "variables", "added"),
    [
        ("aarch64", {}, {"MIMALLOC_PURGE_DELAY": "-1"}),
        ("aarch64", {"HORA_KEEP_FREED_MEMORY": "1"}, {"MIMALLOC_PURGE_DELAY": "-1"}),
        ("aarch64", {"HORA_KEEP_FREED_MEMORY": "0"}, {}),
        ("aarch64", {"MIMALLOC_PURGE_DELAY": "100"}, {}),
        ("x86_64", {}, {}),
    ],
)
def test_torchs_allocator_on_arm_gets_its_variable_at_load_time(
    monkeypatch: pytest.MonkeyPatch, machine: str, variables: dict[str, str], added: dict[str, str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert allocator_variables(variables) == added
