"""Tensors in memory that all ranks map (`hvd.shared_empty` and its kin): reduced where they are, ordinary otherwise."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hvd_session import assert_runtime_works, raises, session

import horovod.torch as hvd
from hora import engine
from hora.engine.registered import IN_PLACE_BYTES
from hora.engine.transport.shm import ShmTransport
from waiting import wait_until

pytestmark = pytest.mark.both_ways

COUNT = IN_PLACE_BYTES // 4 + 1000  # float32


@contextlib.contextmanager
def counting():
    """How many reductions were done in place."""
    done, inner = [], ShmTransport.allreduce_in_place

    def counted(transport, *arguments):
        done.append(1)
        return inner(transport, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShmTransport, "allreduce_in_place", counted)
        yield done


def registry():
    return engine.current_runtime().process_sets.queue(0).registry


def numbers(rank, dtype, count=COUNT):
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    return (values * 50).to(dtype)


@pytest.mark.ranks(2, 3)
@session
def test_it_is_reduced_in_place_with_the_same_bits_as_any_other_tensor():
    with counting() as done:
        kinds = 0
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            count = COUNT * 4 // dtype.itemsize
            tensor, mine = hvd.shared_empty((2, count), dtype), numbers(hvd.rank(), dtype, 2 * count).view(2, count)
            for op, prescale in [(hvd.Sum, 1.0), (hvd.Average, 1.0), (hvd.Max, 1.0), (hvd.Average, 0.3)]:
                expected = hvd.allreduce(mine, op=op, prescale_factor=prescale)
                for name in (None, "named", "named"):
                    tensor.copy_(mine)
                    version = tensor._version
                    assert hvd.allreduce_(tensor, op=op, prescale_factor=prescale, name=name) is tensor
                    assert tensor._version > version
                    assert torch.equal(tensor, expected), (dtype, op, prescale)
                tensor.copy_(mine)
                assert hvd.synchronize(hvd.allreduce_async_(tensor, op=op, prescale_factor=prescale)) is tensor
                assert torch.equal(tensor, expected)
                kinds += 1
        assert len(done) == 4 * kinds


@pytest.mark.ranks(2, 3)
@session
def test_only_tensors_at_the_same_place_are_reduced_in_place():
    rank, size = hvd.rank(), hvd.size()
    tensor, private = hvd.shared_empty(3 * COUNT), torch.empty(COUNT)
    with counting() as done:
        for _ in range(3):
            part = tensor[COUNT : 2 * COUNT].fill_(rank)
            assert hvd.allreduce_(part, name="x", op=hvd.Sum)[-1] == sum(range(size))
        assert len(done) == 3
        for _ in range(3):  # elsewhere on one rank, private on another, too small, not contiguous
            part = (private if rank == 1 else tensor[rank : rank + COUNT]).fill_(rank)
            assert set(hvd.allreduce_(part, name="x", op=hvd.Sum).tolist()) == {sum(range(size))}
            assert hvd.allreduce_(tensor[:10].fill_(1), name="small", op=hvd.Sum)[0] == size
            half = tensor[::2].fill_(1)
            assert hvd.allreduce_(half, name="half", op=hvd.Sum)[-1] == size
        assert len(done) == 3
        handles = [hvd.allreduce_async_(t.fill_(2), name=str(i), op=hvd.Sum) for i, t in enumerate(tensor.view(3, -1))]
        for handle in handles:
            assert hvd.synchronize(handle)[5] == 2 * size
        assert len(done) == 6


@pytest.mark.ranks(2)
@session
def test_new_results_leave_it_as_it_is_and_a_rank_that_has_joined_does_no_harm():
    tensor = hvd.shared_empty(COUNT).fill_(1)
    assert hvd.allreduce(tensor, op=hvd.Sum)[0] == 2
    assert tensor[0] == 1
    if hvd.rank() == 0:
        assert hvd.allreduce_(tensor, op=hvd.Sum, name="alone")[0] == 1
    hvd.join()
    assert hvd.allreduce_(tensor, op=hvd.Sum, name="together")[0] == 2


@pytest.mark.ranks(2)
@session
def test_autograd_knows_it_as_any_other_tensor():
    weight = hvd.shared_like(torch.full((COUNT,), 2.0)).requires_grad_()
    loss = (weight * weight).sum()
    with torch.no_grad():
        hvd.allreduce_(weight, op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (weight * 3).sum().backward()
    assert weight.grad[0] == 3
    assert weight[0] == 4


class Rows(torch.utils.data.Dataset):
    """Reads a shared tensor in a worker, and spoils the worker's copy."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __len__(self):
        return 4

    def __getitem__(self, index):
        row = self.tensor[index].clone()
        self.tensor.fill_(-1)
        return row


@pytest.mark.ranks(2)
@session
def test_pickled_and_in_a_data_loaders_workers_it_is_a_copy():
    tensor = hvd.shared_empty((4, COUNT)).fill_(hvd.rank() + 1)
    with counting() as done:
        copy = pickle.loads(pickle.dumps(tensor))
        assert torch.equal(copy, tensor)
        options = {"num_workers": 1, "batch_size": None, "multiprocessing_context": "fork"}
        rows = list(torch.utils.data.DataLoader(Rows(tensor), **options))
        assert rows[0][0] == hvd.rank() + 1
        assert rows[1][0] == -1
        assert tensor.min() == hvd.rank() + 1
        assert hvd.allreduce_(copy, op=hvd.Sum)[0, 0] == 3
        assert not done
        assert hvd.allreduce_(tensor, op=hvd.Sum)[0, 0] == 3
        assert len(done) == 1
        ForkingPickler.dumps(
            tensor
        )  # for a process that is spawned: torch moves it to memory of its own, on all ranks or one
        assert hvd.allreduce_(tensor, op=hvd.Sum)[0, 0] == 6
        assert len(done) == 1


@pytest.mark.ranks(2)
def test_in_the_next_world_it_is_an_ordinary_tensor():
    hvd.init()
    tensor = hvd.shared_empty(COUNT).fill_(hvd.rank())
    assert hvd.allreduce_(tensor, op=hvd.Sum)[0] == 1
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    with counting() as done:
        assert tensor[0] == 1
        for _ in range(3):
            hvd.allreduce_(tensor, op=hvd.Sum)
        assert tensor[0] == 8
        assert not done
        again = hvd.shared_like(tensor)
        assert hvd.allreduce_(again, op=hvd.Sum)[-1] == 16
        assert len(done) == 1
    hvd.barrier()
    hvd.shutdown()


def memory_of(tensor) -> str:
    """The number of the file without a name in which a tensor lies."""
    for begin, end, number in mapped():
        if begin <= tensor.data_ptr() < end:
            return number
    raise AssertionError("the tensor lies in no shared memory")


def mapped():
    with open("/proc/self/maps") as file:
        for line in file:
            if "memfd:" in line:
                addresses, _, _, _, number, *_ = line.split()
                begin, end = addresses.split("-")
                yield int(begin, 16), int(end, 16), number


@pytest.mark.ranks(2)
@session
def test_memory_goes_with_its_last_tensor():
    tensor = hvd.shared_empty(COUNT)
    memory = memory_of(tensor)
    hvd.allreduce_(tensor, op=hvd.Sum)
    part = tensor[5:7]
    del tensor
    gc.collect()
    assert registry()
    assert memory_of(part) == memory
    del part
    gc.collect()
    assert not registry()
    wait_until("the memory is gone", lambda: memory not in [number for _, _, number in mapped()])


@pytest.mark.ranks(2)
@session
def test_gradients_of_a_model_in_shared_memory():
    torch.manual_seed(0)
    model, twin = torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)
    twin.load_state_dict(model.state_dict())
    data = torch.randn(8, 200, generator=torch.Generator().manual_seed(hvd.rank()))
    for parameter in twin.parameters():
        parameter.grad = None
    with counting() as done:
        with hvd.shared_gradients(model) as (flat,):
            for _ in range(3):
                model.zero_grad()
                model(data).square().sum().backward()
                hvd.allreduce_(flat, name="gradients")
            inside = [parameter.grad for parameter in model.parameters()]
        assert len(done) == 3
    twin(data).square().sum().backward()
    for parameter, other, was in zip(model.parameters(), twin.parameters(), inside, strict=True):
        assert torch.equal(parameter.grad, hvd.allreduce(other.grad))
        assert parameter.grad.data_ptr() != was.data_ptr()
    model(data).square().sum().backward()
    assert torch.equal(flat[: model.weight.numel()].view_as(model.weight), inside[0])


@pytest.mark.ranks(3, lost=(1,))
def test_those_who_reduce_in_place_hear_of_a_death():
    """A wait that only its own limit ends would outlast the test."""
    hvd.init()
    tensor = hvd.shared_empty(COUNT).fill_(1)
    for _ in range(3):
        hvd.allreduce_(tensor, name="x", op=hvd.Sum)
    if hvd.rank() == 1:
        transport = engine.current_runtime().process_sets.queue(0).transport()
        transport.allreduce_in_place = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # all have agreed by then
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        hvd.allreduce_(tensor, name="x", op=hvd.Sum)
    hvd.shutdown()


@pytest.mark.ranks(2)
@session
def test_mistakes_are_told_and_ranks_that_want_different_sizes_go_on():
    with raises(ValueError, "negative", "[-1]"):
        hvd.shared_empty(-1)
    with raises(ValueError, "whole number", "'x'"):
        hvd.shared_empty("x")
    with raises(ValueError, "torch.dtype", "float32"):
        hvd.shared_empty(1, "float32")
    with raises(ValueError, "torch.Tensor", "list"):
        hvd.shared_like([1.0])
    with raises(hvd.HorovodInternalError, "Mismatched SHARED_MEMORY"):
        hvd.shared_empty(COUNT * (1 + hvd.rank()))
    assert hvd.shared_empty((0, 3)).shape == (0, 3)
    assert hvd.shared_empty((), torch.int32).shape == ()
    assert_runtime_works()


@pytest.mark.ranks(1)
@session
def test_alone_it_is_an_ordinary_tensor():
    assert hvd.allreduce_(hvd.shared_empty(COUNT).fill_(3), op=hvd.Sum)[0] == 3
    assert not registry()
