"""Answers to old code's questions about MPI, which Hora does not use, and a class for annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from hora.legacy.shell import execute_quietly

__all__ = ["MPI", "is_intel_mpi", "is_mpich", "is_open_mpi", "is_spectrum_mpi", "js_run", "mpi_available", "mpi_run"]


class MPI:
    """Stands for `mpi4py.MPI` in annotations."""

    class Comm:
        """A communicator."""


def _version(env: Mapping[str, str] | None) -> str:
    found = execute_quietly("mpirun --version", env)
    return found[0] if found is not None and found[1] == 0 else ""


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Return whether an `mpirun` answers here."""
    return bool(_version(env))


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    return "Open MPI" in _version(env) or "OpenRTE" in _version(env)


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    return "IBM Spectrum MPI" in _version(env)


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    return "MPICH" in _version(env) or "HYDRA" in _version(env)


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    return "Intel(R) MPI" in _version(env)


def mpi_run(*args: Any, **kwargs: Any) -> NoReturn:
    """There is no MPI controller: an error that says what to use."""
    raise ValueError(
        "MPI support has not been built; Hora needs none. Use horovod.run(…) or horovodrun, or start the script with "
        "mpirun itself."
    )


js_run = mpi_run
