"""The old module of the runtime's start, stop and topology: `hora.torch.basics` and `HorovodBasics`."""

from hora.horovod.basics import HorovodBasics
from hora.horovod.mpi import MPI
from hora.torch.basics import *
