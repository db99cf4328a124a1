"""The old import name: `import horovod.torch as hvd`. Everything lives in `hora.torch`."""

from hora.foreign import warn_if_foreign_horovod
from hora.torch import *
from hora.torch import __all__ as _names
from hora.torch import _check_has_gpu
from horovod.torch import elastic

__all__ = [*_names, "elastic"]

warn_if_foreign_horovod(__file__)
