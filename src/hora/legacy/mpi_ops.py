"""Classes of `horovod.torch.mpi_ops`: autograd functions over the differentiable collectives, and `HorovodBasics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hora import engine
from hora.engine.request import Kind
from hora.torch import basics, ops, reduce_op
from hora.torch.autograd import differentiable
from hora.torch.collective import Collective, Tensors


def _function(collective: Callable[..., Any], *names: str, grouped: bool = False) -> Any:
    """Return a class whose `apply` calls the collective with arguments of these names, in this order.

    A grouped collective gets its tensors after them and returns a tuple.
    """

    def apply(*args: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        return tuple(collective(args[len(names) :], **given)) if grouped else collective(**given)

    return type("HorovodFunction", (), {"__doc__": collective.__doc__, "apply": staticmethod(apply)})


def _alltoall(tensor: Tensor, **options: Any) -> Tensors:
    """Exchange rows; always returns `(output, received_splits)`."""
    return differentiable(Collective(Kind.ALLTOALL, **options), [tensor])


_SCALES = "prescale_factor", "postscale_factor"
_REDUCE = "average", "name", "op", *_SCALES, "process_set"
HorovodAllreduce = _function(ops.allreduce, "tensor", *_REDUCE)
HorovodGroupedAllreduce = _function(ops.grouped_allreduce, *_REDUCE, grouped=True)
HorovodAllgather = _function(ops.allgather, "tensor", "name", "process_set")
HorovodGroupedAllgather = _function(ops.grouped_allgather, "name", "process_set", grouped=True)
HorovodBroadcast = _function(ops.broadcast, "tensor", "root_rank", "name", "process_set")
HorovodAlltoall = _function(_alltoall, "tensor", "splits", "name", "process_set")
HorovodReducescatter = _function(ops.reducescatter, "tensor", "name", "op", "process_set", *_SCALES)
HorovodGroupedReducescatter = _function(ops.grouped_reducescatter, "name", "op", "process_set", *_SCALES, grouped=True)


class HorovodBasics:
    """The functions of `hora.torch.basics`, and the reduce ops, as attributes; all objects share one runtime."""

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        """Ignore the arguments, which locate Horovod's native library."""

    def __getattr__(self, name: str) -> Any:
        return getattr(basics if hasattr(basics, name) else reduce_op, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of every registered process set."""
        return engine.current_runtime().sets.process_sets()


_basics = HorovodBasics()


class MPI:
    """Stands for `mpi4py.MPI` in annotations."""

    class Comm:
        """A communicator."""
