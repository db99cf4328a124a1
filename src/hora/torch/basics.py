"""Start and stop the runtime; query this process's ranks and the features of this build.

A thin layer over the engine. Old code imports this module as `mpi_ops._basics`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hora import engine
from hora.requirements import require, require_gil
from hora.torch import process_sets as sets
from hora.torch.collective import forget_handles
from hora.torch.untraced import leave_untraced
from hora.world import World

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

require("torch", torch.__version__)


def init(comm: Sequence[int] | None = None, process_sets: Sequence[sets.ProcessSet] | str | None = None) -> None:
    """Connect to all ranks and start the runtime unless it is running.

    Args:
        comm: A list of ranks that take part, or an mpi4py communicator; by default all ranks do.
        process_sets: A list of `hvd.ProcessSet`, the same on all ranks; "dynamic" lets sets be added and removed later.

    Raises:
        ValueError: An argument, or a variable of the launcher, is invalid.
    """
    require_gil()
    leave_untraced()
    _check_comm(comm)
    wanted = _check_process_sets(process_sets)
    if not engine.is_initialized():
        forget_handles()
        sets.unbind()
        if isinstance(wanted, str):
            engine.init(dynamic=True)
        else:
            # Pass distinct sets only: `bind` reports a repeated set once the runtime is up.
            engine.init([list(ranks) for ranks in dict.fromkeys(tuple(s.ranks or []) for s in wanted)])
    engine.current_runtime().used_by_hvd = True
    sets.bind([] if isinstance(wanted, str) else wanted)


def shutdown() -> None:
    """Stop the runtime on all ranks; a no-op if it is not running."""
    try:
        engine.shutdown()
    finally:
        forget_handles()
        sets.unbind()


def restart() -> None:
    """Leave this world and join the next, which may have another size; used by elastic training."""
    engine.restart()
    forget_handles()
    sets.unbind()
    sets.bind([])


def is_initialized() -> bool:
    """Return whether the runtime is running."""
    return bool(engine.is_initialized())


def rank() -> int:
    """Return this process's rank in the world."""
    return _world().rank


def engine_rank() -> int:
    """Return this process's rank within its collectives: 0 in a newcomer, which runs alone at first."""
    return sets.runtime_or_value_error().world.rank


def generation() -> int:
    """Return this world's generation number in an elastic job."""
    return sets.runtime_or_value_error().world.generation


def size() -> int:
    """Return the number of processes in the world."""
    return _world().size


def local_rank() -> int:
    """Return this process's rank on its host."""
    return _world().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return _world().local_size


def cross_rank() -> int:
    """Return this host's index among the hosts that have a process with this local rank."""
    return _world().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return _world().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts run the same number of processes."""
    return len({len(ranks) for ranks in sets.runtime_or_value_error().hosts}) == 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start writing a Chrome trace on rank 0; needs HOROVOD_TIMELINE=DYNAMIC (or a path) at init.

    Args:
        file_path: The file that rank 0 writes; open it with `hora view`, Perfetto or chrome://tracing.
        mark_cycles: Also write the moments at which the engine looked for work.
    """
    runtime = sets.runtime_or_value_error()
    if not runtime.config.timeline:
        raise ValueError("start_timeline() needs the environment variable HOROVOD_TIMELINE=DYNAMIC (or a path) at init")
    runtime.recorder.start(str(file_path), mark_cycles=bool(mark_cycles))


def stop_timeline() -> None:
    """Finish and close the timeline file, if one is being written."""
    sets.runtime_or_value_error().recorder.stop()


def mpi_threads_supported() -> bool:
    """Raise ValueError: this build has no MPI."""
    raise ValueError("mpi_threads_supported() has no answer because MPI is not enabled; Hora needs no MPI")


def mpi_enabled() -> bool:
    """Return False."""
    return False


mpi_built = ddl_built = ccl_built = mpi_enabled


def gloo_enabled() -> bool:
    """Return True: Hora takes the place of Horovod's gloo controller."""
    return True


gloo_built = gloo_enabled


def nccl_built() -> int:
    """Return torch's NCCL version as one number (2.18.5 is 21805), or 0."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    """Return whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built with ROCm."""
    return torch.version.hip is not None


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()


def _world() -> World:
    return engine.current_world() or sets.runtime_or_value_error().world


def _check_comm(comm: object) -> None:
    if comm is None or (isinstance(comm, (list, tuple)) and all(isinstance(r, int) for r in comm)):
        return  # a list of ranks selects MPI processes, which do not exist without MPI
    if sets.is_mpi_communicator(comm):
        raise ValueError("init(comm=…) got an MPI communicator, but MPI is not built; leave comm out")
    raise ValueError(f"init(comm=…) takes None or a list of ranks, but got {type(comm).__name__}: {comm!r:.100}")


def _check_process_sets(process_sets: object) -> list[sets.ProcessSet] | str:
    if process_sets is None:
        return []
    if isinstance(process_sets, str) and process_sets.lower() == "dynamic":
        return "dynamic"
    if not isinstance(process_sets, (list, tuple)):
        raise ValueError(f'init(process_sets=…) takes a list of ProcessSet or "dynamic", but got {process_sets!r:.100}')
    for index, entry in enumerate(process_sets):
        if not isinstance(entry, sets.ProcessSet):
            raise ValueError(f"init(process_sets=…): entry {index} must be a ProcessSet, but it is {entry!r:.100}")
    return list(process_sets)
