"""A test mode, `HORA_TEST_POISON=1`, that fills memory that must not be read with NaN.

It fills the padding of gradient buckets after every use and staging buffers when they are taken; torch fills every
tensor that it allocates without values. A sum that reads any of them comes out wrong.
"""

from __future__ import annotations

import functools

import torch

from hora.engine.transport.packing import Buffers
from hora.torch.optimizer.buckets import Bucket, Buckets
from hora.torch.sharded.shards import ShardBucket

NAN = float("nan")


def poison_unused_memory() -> None:
    """Poison memory in this process from now on."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic.fill_uninitialized_memory
    _after(Bucket, "__init__", lambda bucket, _: _poison_gaps(bucket))
    _after(Buckets, "finish", lambda buckets, _: [_poison_gaps(bucket) for bucket in buckets._buckets])
    # Not at the end of a step: until `put`, the reduced slice lies among them.
    _after(ShardBucket, "put", lambda bucket, _: [gap.fill_(NAN) for gap in bucket.gaps])
    _after(Buffers, "get", lambda _, taken: taken.view(torch.uint8).fill_(0xFF))


def _poison_gaps(bucket: Bucket) -> None:
    for gap in (gap for gaps in bucket.gaps for gap in gaps):
        gap.fill_(NAN)


def _after(owner: type, name: str, poison) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def poisoned(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        poison(self, result)
        return result

    setattr(owner, name, poisoned)
