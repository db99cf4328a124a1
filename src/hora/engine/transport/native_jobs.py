"""What the native part is told of a collective: the same steps through the same ring as in Python, so that one member may go
one way and another one the other. Called by the shared-memory transport."""

from __future__ import annotations

import ctypes

from hora.engine.shm import native
from hora.engine.transport.base import Tensors
from hora.engine.transport.ring import AHEAD, Ring

__all__ = ["LAG", "allreduce_natively", "lone_what", "reduce_in_place_natively"]

# A member that has published step s + LAG has reduced its slice of step s.
LAG = AHEAD + 1


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
    lag = 0 if direct else LAG if num_pieces > AHEAD else num_pieces
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


def reduce_in_place_natively(library: native.Library, ring: Ring, views: Tensors, what: native.Sum) -> None:
    """Reduce all members' data where it is: each member its slice of all of it."""
    data = _addresses(views)
    job = native.InPlace(
        data=ctypes.addressof(data),
        count=views[0].numel(),
        dtype=what.dtype_number,
        finish=what.how,
        prescale=what.prescale,
        factor=what.factor,
    )
    ring.reduce_in_place(library, job)


def lone_what(ring: Ring, count: int, digest: bytes, what: native.Sum, stage: float) -> native.What:
    """What all lone allreduces of one kind have in common."""
    return native.What(
        ring=ctypes.pointer(ring.description),
        count=count,
        digest=(ctypes.c_uint8 * 16)(*digest),
        stage=stage,
        dtype=what.dtype_number,
        finish=what.how,
        prescale=what.prescale,
        factor=what.factor,
    )


def _addresses(tensors: Tensors) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
