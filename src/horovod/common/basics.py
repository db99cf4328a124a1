"""The old module of the runtime's start, stop and topology: `hora.torch.basics` and `horovod_basics`."""

from hora.torch.basics import *
from hora.torch.horovod_basics import HorovodBasics
