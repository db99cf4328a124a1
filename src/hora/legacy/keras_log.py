"""A Keras callback that shows a training's progress in the driver. Keras is imported on first use.

Re-exported as `sparkdl.horovod.tensorflow.keras.LogCallback`; it only prints through `log_to_driver`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from hora.launch.driver_log import log_to_driver


class ProgressLog:
    """The callback's methods, without the Keras base class."""

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self.per_batch_log = per_batch_log

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        log_to_driver(f"Epoch {epoch} begins")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self.per_batch_log:
            log_to_driver(f"Batch {batch}: {_values(logs)}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        log_to_driver(f"Epoch {epoch}: {_values(logs)}")


def _values(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name}={value:.6g}" for name, value in (logs or {}).items())


@functools.cache
def log_callback_class() -> type[ProgressLog]:
    """Return `LogCallback(per_batch_log=False)`, a callback of `tf.keras` (it may be Keras 2), or of Keras alone."""
    callbacks: Any
    try:
        if importlib.util.find_spec("tensorflow") is not None:
            callbacks = importlib.import_module("tensorflow").keras.callbacks
        else:
            callbacks = importlib.import_module("keras.callbacks")
    except ImportError as error:
        raise ImportError("LogCallback is a Keras callback and needs Keras: pip install keras") from error
    return type("LogCallback", (ProgressLog, callbacks.Callback), {})
