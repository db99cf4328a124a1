"""Resources of workers: granted and rejected requests, and the shell lines in their code."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.workers.capacity import Capacity, CapacityError
from hora.workers.main import expand_shell_lines

MACHINE = Capacity(cores=(0, 1, 2, 3), memory_gib=16.0, gpus=("0", "1"))


def request_of(**request):
    return request


def test_grants_never_share_a_gpu():
    first = MACHINE.grant("a", request_of(cpu=1, memory=1, nvidia_gpu=1))
    second = first.grant("b", request_of(cpu=1, memory=1, nvidia_gpu=1))
    assert second.grants["a"].gpus != second.grants["b"].gpus
    with pytest.raises(CapacityError, match="1 GPUs were requested, but 0 of 2 are free"):
        second.grant("c", request_of(cpu=1, memory=1, nvidia_gpu=1))
    again = second.release("a").grant("c", request_of(cpu=1, memory=1, nvidia_gpu=1))
    assert again.grants["c"].gpus == ("0",)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"cpu": 5, "memory": 1, "nvidia_gpu": 0}, "5 CPU cores were requested, but 4 of 4"),
        ({"cpu": 1, "memory": 17, "nvidia_gpu": 0}, "17 GiB of memory were requested, but 16 of 16"),
        ({"cpu": 1, "memory": 1, "nvidia_gpu": 3}, "3 GPUs"),
        ({"cpu": 0, "memory": 1, "nvidia_gpu": 0}, "cpu must be a positive number"),
        ({"cpu": 1, "memory": -1, "nvidia_gpu": 0}, "memory must be a positive number"),
        ({"cpu": math.nan, "memory": 1, "nvidia_gpu": 0}, "cpu must be a positive number"),
        ({"cpu": 1, "memory": 1, "nvidia_gpu": -1}, "must not be negative"),
    ],
)
def test_unsatisfiable_requests_are_explained(request_, words):
    with pytest.raises(CapacityError, match=words):
        MACHINE.grant("a", request_)


@pytest.mark.parametrize(
    ("num_workers", "asked", "share"),
    [(2, 2, 2), (1, 4, 4), (2, 4, 2), (3, 2, 4 / 3), (8, 1, 1), (8, 0.5, 0.5), (9, 0.5, 0.5)],
)
def test_too_few_cores_are_shared(num_workers, asked, share):
    assert MACHINE.fair_share(num_workers, asked) == pytest.approx(share)
    capacity = MACHINE
    for number in range(num_workers):
        capacity = capacity.grant(str(number), request_of(cpu=share, memory=1, nvidia_gpu=0, share_cores=True))
    used = [core for grant in capacity.grants.values() for core in grant.cores]
    assert max(used.count(core) for core in MACHINE.cores) - min(used.count(core) for core in MACHINE.cores) <= 1


def test_busy_cores_are_shared_down_to_one_core():
    full = MACHINE.grant("a", request_of(cpu=4, memory=1, nvidia_gpu=0))
    assert full.fair_share(2, 3) == 1
    assert full.fair_share(2, 0.25) == 0.25


def test_memory_and_gpus_are_never_shared():
    with pytest.raises(CapacityError, match="17 GiB"):
        MACHINE.grant("a", request_of(cpu=100, memory=17, nvidia_gpu=0, share_cores=True))
    with pytest.raises(CapacityError, match="3 GPUs"):
        MACHINE.grant("a", request_of(cpu=100, memory=1, nvidia_gpu=3, share_cores=True))


@given(st.lists(st.tuples(st.sampled_from([0.5, 1, 2]), st.integers(0, 1), st.booleans()), max_size=20))
def test_no_resource_is_granted_twice(requests):
    capacity, names = MACHINE, []
    for number, (cpu, gpus, release) in enumerate(requests):
        try:
            capacity = capacity.grant(str(number), request_of(cpu=cpu, memory=2, nvidia_gpu=gpus))
            names.append(str(number))
        except CapacityError:
            pass
        if release and names:
            capacity = capacity.release(names.pop(0))
        grants = capacity.grants.values()
        assert sum(g.cpu for g in grants) <= len(MACHINE.cores)
        assert sum(g.memory_gib for g in grants) <= MACHINE.memory_gib
        given_gpus = [gpu for g in grants for gpu in g.gpus]
        assert len(given_gpus) == len(set(given_gpus))
        assert all(len(g.cores) == max(1, math.ceil(g.cpu)) for g in grants)


def test_shell_lines():
    code = "x = 1\nif x:\n    !echo {x} \\\n  more\nprint('! stays')\n"
    assert expand_shell_lines(code) == (
        "x = 1\nif x:\n    __hora_shell__('echo {x} \\\\\\n  more', globals() | locals())\n\nprint('! stays')\n"
    )


def test_lines_inside_strings_are_not_shell_lines():
    code = "# it's\nx = '''\n!stays\n''' + '\"\"\"'\n!goes\ny = \"\"\"a\\\"\"\"b\n!stays '''\n\"\"\"\n!goes\n"
    lines = expand_shell_lines(code).splitlines()
    assert [line for line in lines if "stays" in line] == ["!stays", "!stays '''"]
    assert [line for line in lines if "goes" in line] == ["__hora_shell__('goes', globals() | locals())"] * 2
    compile("\n".join(lines), "code", "exec")


def test_gpus_of_other_sessions_are_not_granted():
    asked = []

    def claim(gpu):
        asked.append(gpu)
        return "GPU 0: process 7 of user 8" if gpu == "0" else ""

    with pytest.raises(CapacityError, match="99 CPU"):
        MACHINE.grant("a", request_of(cpu=99, memory=1, nvidia_gpu=1), claim)
    assert asked == []
    granted = MACHINE.grant("a", request_of(cpu=1, memory=1, nvidia_gpu=1), claim)
    assert granted.grants["a"].gpus == ("1",)
    with pytest.raises(
        CapacityError,
        match=r"2 GPUs .* but 1 of 2 are free; 1 are in use .* \(GPU 0: process 7 of user 8\)",
    ):
        MACHINE.grant("b", request_of(cpu=1, memory=1, nvidia_gpu=2), claim)
