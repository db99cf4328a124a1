"""Jobs of the native part: collectives that it carries out in one call, described by addresses."""

from __future__ import annotations

import ctypes

from hora.engine.shm import native
from hora.engine.transport.base import Tensors
from hora.engine.transport.ring import AHEAD, Ring

__all__ = ["allreduce_natively", "spec_natively"]

# A member that has published step s + LAG has reduced its slice of step s.
_LAG = AHEAD + 1


def allreduce_natively(
    library: native.Library,
    ring: Ring,
    inputs: Tensors,
    outputs: Tensors,
    count: int,
    what: native.Sum,
    stage: float,
    direct: bool,
) -> None:
    """Reduce tensors of `count` elements together through the slots of the ring, times `stage` on their way into them."""
    sources = _addresses(inputs)
    results = sources if outputs is inputs else _addresses(outputs)
    counts = (ctypes.c_int64 * len(inputs))(*[tensor.numel() for tensor in inputs])
    num_pieces = -(-count * inputs[0].itemsize // ring.slot_bytes)
    lag = _lag(num_pieces, direct)
    job = native.Allreduce(
        inputs=ctypes.addressof(sources),
        outputs=ctypes.addressof(results),
        counts=ctypes.addressof(counts),
        total=count,
        lag=lag,
        dtype=what.dtype_number,
        finish=what.how,
        direct=direct,
        stage=stage,
        prescale=what.prescale,
        factor=what.factor,
    )
    ring.allreduce(library, job, num_pieces + lag)


def spec_natively(
    ring: Ring, count: int, item_bytes: int, digest: bytes, what: native.Sum, stage: float, direct: bool
) -> tuple[native.AllreduceSpec, int]:
    """The common part of repeated allreduces of one kind, and how many steps of the ring each of them takes."""
    num_pieces = -(-count * item_bytes // ring.slot_bytes)
    lag = _lag(num_pieces, direct)
    spec = native.AllreduceSpec(
        ring=ctypes.pointer(ring.description),
        count=count,
        digest=(ctypes.c_uint8 * 16)(*digest),
        dtype=what.dtype_number,
        finish=what.how,
        direct=direct,
        staged=direct and num_pieces == 1,
        lag=lag,
        stage=stage,
        prescale=what.prescale,
        factor=what.factor,
    )
    return spec, num_pieces + lag


def _lag(num_pieces: int, direct: bool) -> int:
    return 0 if direct else _LAG if num_pieces > AHEAD else num_pieces


def _addresses(tensors: Tensors) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
