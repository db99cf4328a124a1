"""Zero-copy conversion between numpy arrays and torch tensors, for frameworks that reach the collectives through numpy.

numpy has no bfloat16 of its own. Such arrays use the dtype of `ml_dtypes`, which every framework with bfloat16
installs, and are converted through their bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_torch(array: Any) -> Tensor:
    """Return a tensor that shares the array's memory; copies read-only arrays and layouts unknown to torch."""
    array = np.asarray(array)
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy(order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_numpy(tensor: Tensor) -> Any:
    """Return an array that shares the memory of a CPU tensor."""
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
