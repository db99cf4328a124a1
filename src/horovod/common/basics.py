"""The old module of the runtime's start, stop and topology: `hora.torch.basics` and `HorovodBasics`."""

from hora.horovod.basics import HorovodBasics
from hora.torch.basics import *
