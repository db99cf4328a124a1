"""The old module of the state functions: `hora.tensorflow.functions`."""

from hora.tensorflow.functions import *
