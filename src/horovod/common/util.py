"""The old module of small tools: `hora.horovod.util`."""

from hora.horovod.util import *
