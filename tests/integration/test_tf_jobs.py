"""Keras and TensorFlow in real jobs: horovodrun, HorovodRunner, horovod.run, and elastic training with a death."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from keras_function import keras_function

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow: make test-tensorflow", allow_module_level=True)

ROOT = Path(__file__).parents[2]
HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")

ELASTIC = """
import os, signal, sys
import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()
tf.keras.utils.set_random_seed(hvd.rank())
model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05)), loss="mse")
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
y = x.sum(1, keepdims=True)
unharmed = hvd.rank() != 1
sizes = []
state.register_reset_callbacks([lambda: sizes.append(hvd.size())])


class Death(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not unharmed and state.epoch == 1 and batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        Death(),
    ]
    model.fit(x, y, batch_size=8, epochs=4 - state.epoch, callbacks=callbacks, verbose=0)


train(state)
weights = hvd.allgather_object([w.tolist() for w in model.get_weights()])
assert all(w == weights[0] for w in weights)
assert sizes or hvd.size() == 3, sizes
print(f"rank {hvd.rank()} of {hvd.size()} ends after epoch {state.epoch}", flush=True)
"""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("module", ["horovod.torch", "horovod.spark.keras"])
def test_an_import_does_not_load_tensorflow(module):
    code = f"import sys, {module}; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0


@pytest.mark.parametrize("example", ["keras_digits.py", "tensorflow_digits.py", "tensorflow_graph.py"])
def test_an_example_on_digits(example, tmp_path):
    more = [] if example == "keras_digits.py" else ["--checkpoint", "digits"]
    out = run(HOROVODRUN, "-np", "2", sys.executable, str(ROOT / "examples" / example), *more, cwd=tmp_path)
    found = re.search(r"2 ranks, accuracy (\d\.\d+)", out)
    assert found is not None
    assert float(found.group(1)) > 0.85
    saved = "digits/model.ckpt-200.index" if example == "tensorflow_graph.py" else "digits-1.index"
    assert not more or (tmp_path / saved).exists()


def test_the_synthetic_benchmark(tmp_path):
    script = str(ROOT / "examples/tensorflow_synthetic.py")
    options = ["--image-size", "32", "--batch-size", "2", "--num-iters", "1", "--fp16-allreduce"]
    out = run(HOROVODRUN, "-np", "2", sys.executable, script, *options, cwd=tmp_path)
    assert re.search(r"Total img/sec on 2 ranks: \d+\.\d", out)


def test_an_elastic_training_survives_a_death(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    worlds = ["-np", "3", "--min-np", "2", "--max-np", "3"]
    out = run("env", f"TMPDIR={temporary}", HOROVODRUN, *worlds, sys.executable, str(script), cwd=tmp_path)
    assert len(re.findall(r"ends after epoch 4", out)) >= 2
    assert list(temporary.iterdir()) == []  # including those of the killed rank


PASSES = """
import os, sys
import numpy as np
import keras
import horovod.keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2), "mse")
state = hvd.elastic.KerasState(model, batch=0)
applied = []


@hvd.elastic.run
def train(state):
    while state.batch < 12:
        if state.batch == 5 and hvd.rank() == 1:
            os._exit(3)
        x = np.random.default_rng(state.batch).normal(size=(8, 4)).astype("float32")
        before = model.get_weights()[0]
        model.train_on_batch(x, x.sum(1, keepdims=True))
        if not np.array_equal(before, model.get_weights()[0]):
            applied.append((hvd.size(), state.batch))
        state.batch += 1
        if state.batch % 3 == 0:  # also in the middle of a step
            state.commit()


train(state)
print("applied", applied, flush=True)
"""


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_a_training_of_several_passes_goes_on_after_a_death(backend, tmp_path):
    """Rank 1 dies in the last pass of a step, after a commit between two passes."""
    script = tmp_path / "train.py"
    script.write_text(PASSES)
    launcher = ["env", f"KERAS_BACKEND={backend}", HOROVODRUN, "-np", "2", "--min-np", "1"]
    out = run(*launcher, sys.executable, str(script), cwd=tmp_path)
    assert "applied [(2, 1), (2, 3), (1, 3), (1, 5), (1, 7), (1, 9), (1, 11)]" in out


def test_horovod_runner_and_run_with_a_keras_function(capfd):
    import horovod
    from sparkdl import HorovodRunner

    size, losses = HorovodRunner(np=-2).run(keras_function(), rate=0.05)
    assert size == 2
    assert losses[1] < losses[0]
    assert "Epoch 1: loss=" in capfd.readouterr().out
    assert [found[0] for found in horovod.run(keras_function(), args=(0.05,), num_proc=2)] == [2, 2]
