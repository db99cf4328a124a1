"""Implementation of `horovod.common.util`: queries about frameworks and back ends, and tools of old scripts.

Hora does not use it: only `horovod.common.util` and `horovod.torch.mpi_ops` re-export it. Only queries about torch
import torch.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hora.errors import HorovodVersionMismatchError, get_version_mismatch_message

# horovod.spark.common.constants
ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
MIXED_SPARSE_DENSE_VECTOR = "mixed_sparse_dense_vector"
SPARSE_VECTOR = "sparse_vector"
DENSE_VECTOR = "dense_vector"
PETASTORM_HDFS_DRIVER = "libhdfs"
METRIC_PRINT_FREQUENCY = 100
BYTES_PER_GIB = 2**30
TOTAL_BUFFER_MEMORY_CAP_GIB = 4

EXTENSIONS = ["tensorflow", "torch", "mxnet"]
_SUPPORTED = ("torch", "tensorflow")

T = TypeVar("T")


_cache = functools.cache


@_cache
def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether `horovod.<ext_base_name>` can be used here."""
    available = ext_base_name in _SUPPORTED and importlib.util.find_spec(ext_base_name) is not None
    if verbose:
        print(f"horovod.{ext_base_name} is {'available' if available else 'not available'}")
    return available


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool | None:
    """Return whether the framework sees a GPU; None if `horovod.<ext_base_name>` is unavailable."""
    if not extension_available(ext_base_name, verbose):
        return None
    if ext_base_name == "tensorflow":
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    return _built("_check_has_gpu")


def is_gloo_used(use_gloo: bool | None = None, use_mpi: bool | None = None, use_jsrun: bool | None = None) -> bool:
    """Return True: Hora's own controller, under that name, starts every job."""
    return True


def _built(question: str, verbose: bool = False) -> bool | None:
    if not extension_available("torch", verbose):
        return None
    from hora.torch import basics

    return bool(getattr(basics, question)())


# Functions of `verbose` that return whether torch has this back end, or None if no extension loads.
mpi_built, gloo_built, nccl_built, ddl_built, ccl_built = (
    functools.partial(_built, f"{name}_built") for name in ("mpi", "gloo", "nccl", "ddl", "ccl")
)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether the number is 1, 2, 4, 8, …"""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - Horovod's name
    """Split into `n` contiguous chunks, the first `len % n` of them one longer."""
    short, longer = divmod(len(l), n)
    starts = [i * short + min(i, longer) for i in range(n + 1)]
    return [l[a:b] for a, b in itertools.pairwise(starts)]


def is_iterable(x: object) -> bool:
    """Return whether `iter(x)` works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless the extension (`horovod.torch` or a path that ends so) is available."""
    base_name = ext_name.rsplit(".", 1)[-1]
    if not extension_available(base_name):
        known = base_name in _SUPPORTED
        reason = f"{base_name} is not installed" if known else "Hora has fronts for PyTorch and TensorFlow"
        raise ImportError(f"{ext_name} is not available: {reason}")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Warn if the loaded `version` is not the installed one; raise if `exception` is given."""
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return
    if installed == version:
        return
    if exception is not None:
        raise HorovodVersionMismatchError(name, version, installed) from exception
    warnings.warn(get_version_mismatch_message(name, version, installed), stacklevel=2)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return a function `(op, average) -> op` over the `Average` and `Sum` of `reduce_ops`."""
    from hora.torch.reduce_op import handle_average_backwards_compatibility as handle

    return functools.partial(handle, average_op=reduce_ops.Average, sum_op=reduce_ops.Sum)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether version `ver` is at least `target`, which has three parts (`"1.10.0"`)."""
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"both versions must be strings, but they are {ver!r} and {target!r}")
    if len(target.split(".")) != 3:
        raise ValueError(f"the target version must have three parts like '1.10.0', but it is {target!r}")
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    parts = [re.match(r"\d*", part) for part in version.split("+")[0].split(".")[:3]]
    numbers = [int(match.group() or 0) if match else 0 for match in parts]
    return tuple(numbers + [0] * (3 - len(numbers)))
