"""The old module of the collectives, of the runtime's start and stop, and of the autograd classes."""

from hora.legacy.mpi_ops import *
from hora.legacy.mpi_ops import HorovodBasics
from hora.legacy.util import gpu_available, num_rank_is_power_2
from hora.torch import *
from hora.torch.reduce_op import handle_average_backwards_compatibility

_basics = HorovodBasics()
