"""Classes of `horovod.torch.mpi_ops`: autograd functions over the differentiable collectives, and `HorovodBasics`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hora import engine
from hora.engine.request import Kind
from hora.torch import basics, ops, reduce_op
from hora.torch.autograd import differentiable
from hora.torch.collective import Collective, Tensors
from hora.torch.compression import Compression
from hora.torch.process_sets import ProcessSet


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
    """Sends the root's tensor to every rank."""

    apply = staticmethod(ops.broadcast)


class HorovodAlltoall:
    """Exchanges rows; always returns `(output, received_splits)`."""

    @staticmethod
    def apply(
        tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
    ) -> Tensors:
        return differentiable(Collective(Kind.ALLTOALL, name, process_set, splits=splits), [tensor])


class HorovodReducescatter:
    """Reduces one tensor and keeps this rank's rows."""

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
    """Reduces several tensors as one operation and keeps this rank's rows of each."""

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


class HorovodBasics:
    """The functions of `hora.torch.basics` as methods; all objects share one runtime."""

    Average = reduce_op.Average
    Sum = reduce_op.Sum
    Adasum = reduce_op.Adasum
    Min = reduce_op.Min
    Max = reduce_op.Max
    Product = reduce_op.Product

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        """Ignore the arguments, which locate Horovod's native library."""

    def __getattr__(self, name: str) -> Any:
        return getattr(basics, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of every registered process set."""
        return engine.current_runtime().sets.process_sets()


_basics = HorovodBasics()


class MPI:
    """Stands for `mpi4py.MPI` in annotations."""

    class Comm:
        """A communicator."""
