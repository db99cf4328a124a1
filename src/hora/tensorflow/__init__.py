"""The `hvd` interface for TensorFlow: `import horovod.tensorflow as hvd` imports these names.

It uses the same engine as the torch interface: a process may use both, and they share one runtime.
"""

from hora.errors import HorovodInternalError
from hora.tensorflow import functions, ops
from hora.tensorflow.bridge import gpu_available
from hora.tensorflow.compression import Compression
from hora.tensorflow.functions import *
from hora.tensorflow.ops import *
from hora.torch import basics, process_sets, reduce_op
from hora.torch.basics import *
from hora.torch.process_sets import *
from hora.torch.reduce_op import *

__all__ = [
    *basics.__all__,
    *functions.__all__,
    *ops.__all__,
    *process_sets.__all__,
    *reduce_op.__all__,
    "Compression",
    "HorovodInternalError",
    "gpu_available",
]
