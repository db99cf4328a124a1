"""The old module of the collectives: `hora.torch.ops`, `basics`, `autograd`, `process_sets` and friends."""

from hora.horovod.basics import HorovodBasics
from hora.horovod.util import gpu_available, num_rank_is_power_2
from hora.torch import *
from hora.torch.autograd import *
from hora.torch.reduce_op import handle_average_backwards_compatibility

_basics = HorovodBasics()
