"""`HorovodBasics`: what `basics` offers, as the methods of one object. Old code knows it as `mpi_ops._basics`."""

from __future__ import annotations

from hora import engine
from hora.torch import basics, reduce_op

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Starts and stops the runtime and answers questions about it; every object is the same runtime's."""

    Average = reduce_op.Average
    Sum = reduce_op.Sum
    Adasum = reduce_op.Adasum
    Min = reduce_op.Min
    Max = reduce_op.Max
    Product = reduce_op.Product

    init = staticmethod(basics.init)
    shutdown = staticmethod(basics.shutdown)
    is_initialized = staticmethod(basics.is_initialized)
    start_timeline = staticmethod(basics.start_timeline)
    stop_timeline = staticmethod(basics.stop_timeline)
    rank = staticmethod(basics.rank)
    size = staticmethod(basics.size)
    local_rank = staticmethod(basics.local_rank)
    local_size = staticmethod(basics.local_size)
    cross_rank = staticmethod(basics.cross_rank)
    cross_size = staticmethod(basics.cross_size)
    is_homogeneous = staticmethod(basics.is_homogeneous)
    mpi_threads_supported = staticmethod(basics.mpi_threads_supported)
    mpi_enabled = staticmethod(basics.mpi_enabled)
    mpi_built = staticmethod(basics.mpi_built)
    gloo_enabled = staticmethod(basics.gloo_enabled)
    gloo_built = staticmethod(basics.gloo_built)
    nccl_built = staticmethod(basics.nccl_built)
    ddl_built = staticmethod(basics.ddl_built)
    ccl_built = staticmethod(basics.ccl_built)
    cuda_built = staticmethod(basics.cuda_built)
    rocm_built = staticmethod(basics.rocm_built)

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        """The arguments say where Horovod's native library is; there is none here."""

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """The ranks of every registered process set."""
        return engine.current_runtime().process_sets()
