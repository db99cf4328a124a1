"""The old import name: `import horovod.torch as hvd`. Everything lives in `hora.torch`."""

from hora.legacy.util import check_extension
from hora.torch import *
from hora.torch import __all__ as _names
from hora.torch import _check_has_gpu
from horovod.torch import (  # type: ignore[attr-defined]
    compression,
    elastic,
    functions,
    mpi_ops,
    optimizer,
    sync_batch_norm,
)

__all__ = [*_names, "compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm"]

_MPI_LIB_AVAILABLE = True  # Horovod's flag that its library was loaded
