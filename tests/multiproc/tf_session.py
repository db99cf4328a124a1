"""Sessions, predictable data and comparisons for the tests of horovod.tensorflow, as in `hvd_session`."""

from __future__ import annotations

import functools
import os

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
from hvd_session import even_and_odd, raises, values

import horovod.tensorflow as hvd
from hora.keras.values import as_numpy

__all__ = ["DTYPES", "FLOATS", "MOVED", "SMALL", "check", "mine", "of_all", "raises", "session"]

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
DTYPES = [tf.int32, tf.int64, *FLOATS]
SMALL = [tf.uint8, tf.int8, tf.int16]
MOVED = [*DTYPES, *SMALL, tf.uint16, tf.uint32, tf.uint64, tf.bool]


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

    del wrapped.__wrapped__
    return wrapped


def _array(rank, shape, dtype, salt):
    import torch

    if dtype.name.startswith("uint"):
        return as_numpy(values(rank, shape, torch.uint8, salt)).astype(dtype.name)
    return as_numpy(values(rank, shape, getattr(torch, dtype.name), salt))


def mine(shape, dtype, salt=0):
    return tf.constant(_array(hvd.rank(), shape, dtype, salt))


def of_all(process_set, shape, dtype, salt=0):
    return [_array(rank, shape, dtype, salt) for rank in getattr(process_set, "ranks", process_set)]


def check(actual, expected, dtype) -> None:
    """Check for equal dtype, shape and values, within the precision of the dtype."""
    assert actual.dtype == dtype, (actual.dtype, dtype)
    found = np.asarray(actual, dtype=np.float64)
    assert found.shape == np.shape(expected), (found.shape, np.shape(expected))
    tolerance = {tf.float16: 2e-3, tf.bfloat16: 2e-2, tf.float32: 1e-5}.get(dtype, 1e-9)
    np.testing.assert_allclose(found, np.asarray(expected, np.float64), rtol=tolerance, atol=tolerance)
