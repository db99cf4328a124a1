"""The old module of `Compression`: `hora.torch.compression`."""

from hora.torch.compression import *
