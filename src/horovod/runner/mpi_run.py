"""What old code asks about MPI. Re-exports only."""

from hora.horovod.mpi import is_intel_mpi, is_mpich, is_open_mpi, is_spectrum_mpi, mpi_available, mpi_run

__all__ = ["is_intel_mpi", "is_mpich", "is_open_mpi", "is_spectrum_mpi", "mpi_available", "mpi_run"]
