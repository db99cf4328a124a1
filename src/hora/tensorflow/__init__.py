"""The `hvd` interface for TensorFlow: `import horovod.tensorflow as hvd` imports these names.

It uses the same engine as the torch interface: a process may use both, and they share one runtime.
"""

from hora.errors import HorovodInternalError
from hora.tensorflow import functions, ops
from hora.tensorflow.bridge import gpu_available
from hora.tensorflow.compression import Compression
from hora.tensorflow.functions import *
from hora.tensorflow.ops import *
from hora.torch import basics
from hora.torch.basics import *
from hora.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hora.torch.reduce_op import Adasum, Average, Max, Min, Product, Sum

__all__ = [
    *basics.__all__,
    *functions.__all__,
    *ops.__all__,
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "global_process_set",
    "gpu_available",
    "remove_process_set",
]
