"""Numpy arrays as torch tensors and back, without a copy: how other frameworks reach the collectives.

numpy itself has no bfloat16: arrays of it carry the dtype of the package ml_dtypes, which every framework with
bfloat16 brings along, and travel as their bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_numpy", "as_torch"]


def as_torch(array: Any) -> Tensor:
    """Return a tensor on the array's memory; a copy of layouts that torch lacks and of read-only arrays."""
    array = np.asarray(array)
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy(order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_numpy(tensor: Tensor) -> Any:
    """Return an array on the memory of a tensor of the CPU."""
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
