"""The output of the Keras callback, tested without Keras."""

from __future__ import annotations

import importlib.util

import pytest

from hora.legacy.keras_log import ProgressLog


def test_epochs_are_always_logged_and_batches_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    quiet, chatty = ProgressLog(), ProgressLog(per_batch_log=True)
    quiet.on_epoch_begin(0)
    quiet.on_train_batch_end(3, {"loss": 0.5})
    quiet.on_epoch_end(0, {"loss": 0.25, "accuracy": 0.75})
    chatty.on_train_batch_end(3, {"loss": 0.5})
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 0 begins",
        "Epoch 0: loss=0.25, accuracy=0.75",
        "Batch 3: loss=0.5",
    ]


@pytest.mark.skipif(importlib.util.find_spec("keras") is not None, reason="Keras is installed")
def test_without_keras_the_error_names_the_package_to_install() -> None:
    from sparkdl.horovod.tensorflow import keras

    with pytest.raises(ImportError, match="pip install keras"):
        _ = keras.LogCallback
