"""Profilers, modes, hooks and checks of torch see the calls of a process group; other backends may be beside it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import hora.torch.distributed  # noqa: F401 - registers the backend

HAS_BACKENDS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
needs_backends = pytest.mark.skipif(not HAS_BACKENDS, reason="this torch has no backends in Python: from 2.14 on")
pytestmark = pytest.mark.ranks(2)


@contextmanager
def group(backend: str = "hora") -> Iterator[dist.ProcessGroup]:
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def calls() -> dict[str, Callable[[bool], object]]:
    """Return one call of every collective, by its name in profiles; `True` makes it asynchronous."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def rows() -> torch.Tensor:
        return torch.full((size, 3), float(rank))

    def parts() -> list[torch.Tensor]:
        return list(rows())

    mine, here = rows()[0], rank == 0
    return {
        "all_reduce": lambda later: dist.all_reduce(mine, async_op=later),
        "reduce": lambda later: dist.reduce(mine, 0, async_op=later),
        "broadcast": lambda later: dist.broadcast(mine, 0, async_op=later),
        "all_gather": lambda later: dist.all_gather(parts(), mine, async_op=later),
        "all_gather_into_tensor": lambda later: dist.all_gather_into_tensor(rows().flatten(), mine, async_op=later),
        "reduce_scatter": lambda later: dist.reduce_scatter(mine, parts(), async_op=later),
        "reduce_scatter_tensor": lambda later: dist.reduce_scatter_tensor(mine, rows().flatten(), async_op=later),
        "gather": lambda later: dist.gather(mine, parts() if here else None, 0, async_op=later),
        "scatter": lambda later: dist.scatter(mine, parts() if here else None, 0, async_op=later),
        "all_to_all": lambda later: dist.all_to_all_single(rows(), rows(), async_op=later),
        "barrier": lambda later: dist.barrier(async_op=later),
    }


@pytest.mark.parametrize("later", [False, True])
def test_a_profile_has_an_entry_with_the_shapes_of_every_call(later):
    with group():
        for name, call in calls().items():
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
            ) as profile:
                work = call(later)
                if later:
                    work.wait()
            found = [event for event in profile.events() if event.name == f"hora:{name}"]
            assert len(found) == 1, (name, [event.name for event in profile.events()])
            if name in ("all_reduce", "broadcast", "reduce", "all_gather", "gather"):
                assert found[0].input_shapes == [[3]], (name, found[0].input_shapes)


def test_messages_are_in_the_profile():
    with group():
        other = 1 - dist.get_rank()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            work = dist.isend(torch.ones(3), other)
            dist.recv(torch.ones(3), other)
            work.wait()
        names = [event.name for event in profile.events()]
        assert names.count("hora:send") == names.count("hora:recv") == 1


def test_a_dispatch_mode_counts_the_same_calls_as_with_gloo():
    counts = {}
    for backend in ("gloo", "hora"):
        with group(backend):
            model = DistributedDataParallel(torch.nn.Linear(4, 4))
            with CommDebugMode() as mode:
                for name, call in calls().items():
                    if name not in ("reduce_scatter", "barrier"):
                        call(False)
                        call(True).wait()
                model(torch.ones(2, 4)).sum().backward()
            counts[backend] = {str(name): number for name, number in mode.get_comm_counts().items()}
    assert counts["hora"] == counts["gloo"]
    assert sum(counts["hora"].values()) >= 16


def test_results_are_the_same_while_somebody_watches():
    with group(), CommDebugMode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        for later in (False, True):
            own = torch.full((3,), float(dist.get_rank() + 1))
            work = dist.all_reduce(own, async_op=later)
            if later:
                work.wait()
            assert own.tolist() == [3.0] * 3
            rows = torch.zeros(2)
            work = dist.all_gather_into_tensor(rows, own[:1] * 0 + dist.get_rank(), async_op=later)
            if later:
                work.wait()
            assert rows.tolist() == [0.0, 1.0]


def test_a_watched_work_is_as_able_as_any():
    with group(), CommDebugMode():
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert len(work.result()) == 1
        assert work.get_future().value()[0].tolist() == [2.0] * 3


@needs_backends
def test_hooks_surround_every_call():
    seen: list[str] = []
    with group() as own:
        own.register_pre_hook(1, lambda call: seen.append(f"before {call.name.name}"))
        own.register_post_hook(2, lambda call: seen.append(f"after {call.name.name}"))
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0, async_op=True).wait()
        assert seen == ["before ALLREDUCE", "after ALLREDUCE", "before BROADCAST", "after BROADCAST"]
        own.unregister_pre_hook(1)
        own.unregister_post_hook(2)
        dist.all_reduce(torch.ones(3))
        assert len(seen) == 4


@needs_backends
@pytest.mark.ranks(2, env={"TORCH_FR_BUFFER_SIZE": "100"})
def test_the_flight_recorder_has_every_call():
    with group():
        for call in calls().values():
            call(False)
        dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False, "hora"))
        names = [entry["profiling_name"].partition(":")[2] for entry in dump["entries"]]
        assert len(names) >= len(calls()), names
        assert {"all_reduce", "broadcast"} <= set(names)


@needs_backends
@pytest.mark.ranks(2, env={"TORCH_DIST_NAN_CHECK": "1"})
def test_torch_finds_nan_before_it_is_sent():
    with group():
        values = torch.ones(3)
        dist.all_reduce(values)
        with pytest.raises(RuntimeError, match="NaN"):
            dist.all_reduce(torch.full((3,), math.nan))


@needs_backends
@pytest.mark.ranks(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
def test_detail_names_the_difference_between_the_ranks():
    dist.set_debug_level_from_env()  # torch was imported before it was set
    with group():
        dist.all_reduce(torch.ones(3))
        call = calls()["all_reduce" if dist.get_rank() == 0 else "broadcast"]
        with pytest.raises(RuntimeError, match="Detected mismatch between collectives on ranks"):
            call(False)


@needs_backends
def test_another_backend_serves_another_device():
    with group("cpu:hora,cuda:gloo") as own:
        assert type(dist.get_backend_impl(own, torch.device("cpu"))).__name__ == "HoraBackend"
        assert "Gloo" in type(dist.get_backend_impl(own, torch.device("cuda"))).__name__
        rank = dist.get_rank()
        for later in (False, True):
            values = torch.full((3,), float(rank + 1))
            work = dist.all_reduce(values, async_op=later)
            if later:
                assert work.get_future().wait()[0].tolist() == [3.0] * 3
                work.wait()
            assert values.tolist() == [3.0] * 3
        for call in calls().values():
            call(False)
            call(True).wait()
        found: list[object] = [None, None]
        dist.all_gather_object(found, {"rank": rank})
        assert found == [{"rank": 0}, {"rank": 1}]
        other = torch.zeros(1)
        work = dist.isend(torch.full((1,), float(rank)), 1 - rank)
        dist.recv(other, 1 - rank)
        work.wait()
        assert other.item() == 1 - rank
        half = dist.new_group([0, 1], backend="cpu:hora,cuda:gloo", timeout=timedelta(seconds=20))
        dist.all_reduce(values, group=half)
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@needs_backends
def test_one_backend_named_for_each_device_is_one_group():
    with group("cpu:hora,cuda:hora") as own:
        assert type(own).__name__ == "HoraProcessGroup"
        values = torch.ones(3)
        dist.all_reduce(values)
        assert values.tolist() == [2.0] * 3


@pytest.mark.skipif(HAS_BACKENDS, reason="from 2.14 on torch has a backend for each device")
def test_several_backends_are_refused_where_torch_would_drop_all_but_one():
    with (
        pytest.raises(ValueError, match=r"cannot have several backends .* torch 2\.14 or newer"),
        group("cpu:hora,cuda:gloo"),
    ):
        pass
