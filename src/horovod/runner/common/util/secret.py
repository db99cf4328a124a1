"""Keys and digests under their old name. Re-exports only."""

from hora.horovod.secret import *
