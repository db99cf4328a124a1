"""Rank and size of this process, and which variables travel."""

from hora.horovod.env import (
    IGNORE_REGEXES,
    KUBEFLOW_MPI_EXEC,
    LOG_LEVEL_STR,
    get_env_rank_and_size,
    is_exportable,
    is_kubeflow_mpi,
)

__all__ = [
    "IGNORE_REGEXES",
    "KUBEFLOW_MPI_EXEC",
    "LOG_LEVEL_STR",
    "get_env_rank_and_size",
    "is_exportable",
    "is_kubeflow_mpi",
]
