"""Start of the runtime for TensorFlow; everything else about it is the torch front's."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

import hora.torch as hvd
from hora.tensorflow.errors import translate_errors
from hora.torch.process_sets import ProcessSet

__all__ = ["gpu_available", "init"]


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect with all ranks and start the runtime, unless it runs. `process_sets`: a list or "dynamic"."""
    translate_errors()
    hvd.init(comm, process_sets)


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU. The arguments are Horovod's and mean nothing here."""
    return bool(tf.config.list_physical_devices("GPU"))
