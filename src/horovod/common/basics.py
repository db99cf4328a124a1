"""The old module of the runtime's start, stop and topology: `hora.torch.basics`."""

from hora.torch.basics import *
