"""This machine's addresses under their old name. Re-exports only."""

from hora.horovod.network import *
