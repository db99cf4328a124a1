"""The old module of `Compression`: `hora.tensorflow.compression`."""

from hora.tensorflow.compression import *
