"""IBM's jsrun under its old name: an error that says what to use. Re-exports only."""

from hora.horovod.mpi import mpi_run as js_run

__all__ = ["js_run"]
