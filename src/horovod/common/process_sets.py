"""The old module of process sets: `hora.torch.process_sets`."""

from hora.horovod.basics import HorovodBasics
from hora.horovod.mpi import MPI
from hora.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
