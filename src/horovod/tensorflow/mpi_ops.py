"""The old module of the collectives and of the runtime's start and stop: `hora.tensorflow`."""

from hora.legacy.mpi_ops import HorovodBasics
from hora.tensorflow import *
from hora.torch.reduce_op import handle_average_backwards_compatibility

_basics = HorovodBasics()
