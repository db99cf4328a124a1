"""CUDA tensors through the GPU's memory, tested without a GPU: host memory replaces the device's.
Every stream operation is thus complete when it returns. The use and growth of slots and the data that members read
are real; `test_gpu.py` tests the rest.
"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch
from groups import make_group
from test_shm_transport import SharedSegments
from transport_checks import check_everything

from hora.engine.shm.segment import Segment
from hora.engine.transport import cuda_staging, device_memory
from hora.engine.transport.base import Membership
from hora.engine.transport.cuda_ipc import DriverError
from hora.engine.transport.device_memory import DeviceMemoryTransport
from hora.engine.transport.distributed import DistributedTransport
from hora.errors import HorovodInternalError


class Memory:
    """Replaces the memory of `cuda_ipc`; allocations of `refuses` bytes or more fail."""

    refuses = 1 << 40

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def tensor(self):
        return self.segment.tensor(0, self.segment.num_bytes, torch.uint8)

    def close(self) -> None:
        self.segment.close()


class Shared(Memory):
    def __init__(self, num_bytes: int) -> None:
        if num_bytes >= self.refuses:
            raise DriverError("out of memory")
        super().__init__(Segment.create(num_bytes))
        self.handle = f"/proc/{os.getpid()}/fd/{self.segment.descriptor}"


class Mapped(Memory):
    def __init__(self, handle: str, num_bytes: int) -> None:
        super().__init__(Segment.attach(os.open(handle, os.O_RDWR)))


@contextlib.contextmanager
def made(place, check_alive=lambda: None, refuses=1 << 40):
    """The transport of this member, with slots that begin small. `refuses`: so many bytes cannot be had here."""
    cpu = DistributedTransport(make_group("tcp", place.store, place.rank, place.size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "Shared", Shared)
        patch.setattr(device_memory, "Mapped", Mapped)
        patch.setattr(device_memory, "SMALL_BYTES", 64)
        patch.setattr(device_memory, "_FIRST_SLOT_BYTES", 4096)
        patch.setattr(device_memory, "_LARGEST_SLOT_BYTES", 65536)
        patch.setattr(device_memory, "mark", lambda: None)
        patch.setattr(device_memory, "wait_for", lambda event, check_alive: None)
        patch.setattr(cuda_staging, "mark", lambda: SimpleNamespace(synchronize=lambda: None))
        patch.setattr(Memory, "refuses", refuses)
        try:
            transport = DeviceMemoryTransport(
                SharedSegments(place, place.store)(DeviceMemoryTransport.num_bytes(place.size)),
                place.gather,
                Membership(place.rank, place.size, check_alive),
                torch.device("cpu"),
                cpu,
            )
            yield transport
            transport.close()
        finally:
            cpu.close()


@pytest.mark.ranks(2, 3)
def test_every_operation_is_correct_and_bit_identical_on_all_members(place):
    with made(place) as transport:
        results = check_everything(transport, place.rank, place.size)
    assert place.gather(results) == [results] * place.size


@pytest.mark.ranks(2)
def test_slots_stay_small_if_one_member_cannot_grow_them(place):
    with made(place, refuses=16384 if place.rank == 1 else 1 << 40) as transport:
        results = check_everything(transport, place.rank, place.size)
    assert place.gather(results) == [results] * 2


@pytest.mark.ranks(2)
def test_a_failed_allocation_on_one_member_fails_on_all(place):
    with pytest.raises(DriverError, match="out of memory"), made(place, refuses=1 if place.rank else 1 << 40):
        pass


@pytest.mark.ranks(2)
def test_the_liveness_check_ends_the_wait_for_a_missing_member(place):
    def gone():
        raise HorovodInternalError("rank 0 is gone")

    with made(place, check_alive=gone) as transport:
        if place.rank == 1:
            with pytest.raises(HorovodInternalError, match="rank 0 is gone"):
                transport.broadcast([torch.ones(1000)], 0)
        place.gather("both are here")
