"""Shared parts of the hvd tests: a session per test, data that every rank can predict, comparisons.

Bodies run inside rank processes and use only `hvd`. Expected values are computed locally from the data of
all ranks, which `values` makes predictable, so no collective is trusted to check itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zlib

import pytest
import torch
from packaging.version import Version

import horovod.torch as hvd

REDUCED = [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
SMALL = [torch.uint8, torch.int8, torch.int16]
MOVED = [*REDUCED, *SMALL, torch.bool]
SHAPES = [(), (0,), (1,), (17,), (5, 17), (3, 4, 17)]
ROWS = [(0, 3), (17,), (5, 17), (2, 4, 17)]

needs_torch_2_7 = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"), reason='the backend "hora" of torch.distributed needs torch 2.7'
)


def world_size() -> int:
    return int(os.environ.get("HOROVOD_SIZE", "1"))


def even_and_odd() -> list[hvd.ProcessSet]:
    """Return two sets that divide the world; none in a world of one."""
    n = world_size()
    return [hvd.ProcessSet(range(first, n, 2)) for first in (0, 1)] if n > 1 else []


def session(body=None, *, sets: bool = False):
    """Run the body between `init` and `barrier; shutdown`; with `sets`, pass it the sets of this rank."""
    if body is None:
        return functools.partial(session, sets=sets)

    @functools.wraps(body)
    def wrapped():
        halves = even_and_odd() if sets else []
        hvd.init(process_sets=halves or None)
        try:
            if sets:
                body([hvd.global_process_set, *[half for half in halves if half.included()]])
            else:
                body()
            hvd.barrier()
        finally:
            hvd.shutdown()

    del wrapped.__wrapped__  # pytest would take the body's parameters for fixtures
    return wrapped


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return the data of a rank: small integers, so that sums of a few ranks are exact in every dtype."""
    seed = zlib.crc32(repr((rank, tuple(shape), str(dtype), salt)).encode())
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 2) if dtype is torch.bool else (0, 9) if dtype is torch.uint8 else (-8, 9)
    return torch.randint(low, high, tuple(shape), generator=generator).to(dtype)


def mine(shape, dtype, salt=0):
    return values(hvd.rank(), shape, dtype, salt)


def of_all_ranks(process_set, shape, dtype, salt=0) -> list[torch.Tensor]:
    return [values(rank, shape, dtype, salt) for rank in process_set.ranks]


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert isinstance(actual, torch.Tensor), actual
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert torch.equal(actual, expected), (actual, expected)


def fingerprint(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def assert_same_everywhere(tensors, process_set=hvd.global_process_set) -> None:
    """Assert that the tensors are bit-identical on all members."""
    found = hvd.allgather_object([fingerprint(t) for t in tensors], process_set=process_set)
    assert all(other == found[0] for other in found), found


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str):
    """Assert that the block raises `kind` with all these words in its message."""
    with pytest.raises(kind) as caught:
        yield caught
    missing = [word for word in words if word.lower() not in str(caught.value).lower()]
    assert not missing, f"{missing} not in: {caught.value}"


def assert_runtime_works() -> None:
    got = hvd.allreduce(torch.ones(3), op=hvd.Sum)
    assert got.tolist() == [hvd.size()] * 3
