"""Environment access for old names; the only module of this package that reads the environment.

Only old code reads rank and size this way (`horovod.runner.common.util.env`). Hora uses
`platforms.detect.detect_world`, which supports more launchers and validates the values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager

from hora.config import changed_environment
from hora.platforms import lsf

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
# Variables that belong to a shell or a host and are not sent to other hosts.
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES"}
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"

_PAIRS = (("HOROVOD_RANK", "HOROVOD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def get_env_rank_and_size(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return rank and size from the first pair of variables, else (0, 1); raises RuntimeError for half a pair."""
    found_in = os.environ if environ is None else environ
    for rank_name, size_name in _PAIRS:
        rank, size = found_in.get(rank_name), found_in.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            found, missing = (rank_name, size_name) if size is None else (size_name, rank_name)
            raise RuntimeError(f"{found} is set but {missing} is not; set both or neither")
    return 0, 1


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    """Set environment variables inside the block and restore the old values; None values are ignored."""
    return changed_environment({name: str(value) for name, value in kwargs.items() if value is not None})


def is_exportable(v: str) -> bool:
    """Return whether a variable of this name may be sent to other hosts."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def is_kubeflow_mpi() -> bool:
    """Return whether Open MPI is configured to reach its hosts in the mpi-operator's old way."""
    return os.environ.get("OMPI_MCA_plm_rsh_agent") == KUBEFLOW_MPI_EXEC  # noqa: SIM112 - Open MPI's name


class LSFUtils:
    """Detects LSF jobs. The other methods of Horovod's class need IBM's tools for one machine family."""

    @staticmethod
    def using_lsf() -> bool:
        return lsf.in_job(os.environ)


def env_without_world() -> dict[str, str]:
    """Return this process's environment for a child that is not a rank, and takes no option of Hora but HORA_NATIVE."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "HORA_NATIVE" or not name.startswith(("HOROVOD_", "HORA_"))
    }
