"""Horovod's autograd classes of `mpi_ops`: their `apply`, over the differentiable collectives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hora.engine.request import Kind
from hora.torch import ops
from hora.torch.autograd import differentiable
from hora.torch.collective import Collective, Tensors
from hora.torch.compression import Compression
from hora.torch.process_sets import ProcessSet

__all__ = [
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
]


class HorovodAllreduce:
    """Reduces one tensor."""

    @staticmethod
    def apply(
        tensor: Tensor,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> Tensor:
        none = Compression.none
        return ops.allreduce(tensor, average, name, none, op, prescale_factor, postscale_factor, process_set)


class HorovodGroupedAllreduce:
    """Reduces several tensors as one operation."""

    @staticmethod
    def apply(
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> Tensors:
        none = Compression.none
        return tuple(
            ops.grouped_allreduce(tensors, average, name, none, op, prescale_factor, postscale_factor, process_set)
        )


class HorovodAllgather:
    """Concatenates the tensors of all ranks."""

    apply = staticmethod(ops.allgather)


class HorovodGroupedAllgather:
    """Concatenates several tensors as one operation."""

    @staticmethod
    def apply(name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Tensors:
        return ops.grouped_allgather(tensors, name, process_set)


class HorovodBroadcast:
    """Gives every rank the root's tensor."""

    apply = staticmethod(ops.broadcast)


class HorovodAlltoall:
    """Exchanges rows; always gives `(output, received_splits)`."""

    @staticmethod
    def apply(
        tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
    ) -> Tensors:
        return differentiable(Collective(Kind.ALLTOALL, name, process_set, splits=splits), [tensor])


class HorovodReducescatter:
    """Reduces one tensor and keeps the own rows."""

    @staticmethod
    def apply(
        tensor: Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
    ) -> Tensor:
        none = Compression.none
        return ops.reducescatter(tensor, name, none, op, process_set, prescale_factor, postscale_factor)


class HorovodGroupedReducescatter:
    """Reduces several tensors as one operation and keeps the own rows of each."""

    @staticmethod
    def apply(
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: Tensor,
    ) -> Tensors:
        none = Compression.none
        return tuple(ops.grouped_reducescatter(tensors, name, none, op, process_set, prescale_factor, postscale_factor))
