"""The old import name: `import horovod.tensorflow as hvd`. Everything lives in `hora.tensorflow` and `hora.keras`."""

from hora.tensorflow import *
from hora.tensorflow import __all__ as _names

__all__ = [*_names]
