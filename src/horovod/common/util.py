"""The old module of small tools: `hora.horovod_util`."""

from hora.horovod_util import *
