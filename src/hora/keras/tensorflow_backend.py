"""Aggregation of the gradients of a Keras optimizer whose variables are TensorFlow's."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from hora.keras.start_check import StartCheck
from hora.tensorflow.gradients import Reduction, check_options
from hora.torch.basics import rank

__all__ = ["TensorFlowAggregation"]


class TensorFlowAggregation:
    """Adds gradients up for `passes` calls, then reduces them over the ranks and updates."""

    def __init__(self, options: dict[str, Any], passes: int, average: bool, scale_local: bool) -> None:
        check_options(options["op"], options["gradient_predivide_factor"], passes)
        self._reduce = Reduction(**options, scale_local_gradients=scale_local)
        self._passes, self._average = passes, average
        self._sums: dict[int, Any] = {}
        self._num_calls: Any = None
        self.local: dict[int, Any] = {}
        self.process_set = self._reduce.process_set
        self._check = StartCheck()

    def __call__(self, optimizer: Any, gradients: list[Any], variables: list[Any], update: Any) -> Any:
        """Take the gradients of one call; `update(gradients, variables)` when they are those of the whole step."""
        if self._passes == 1:
            return update(self.reduced(gradients, variables), variables)
        with tf.init_scope():
            self._prepare(optimizer, gradients, variables)
        known = [
            (gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]
        for gradient, variable in known:
            self._sums[id(variable)].assign_add(tf.convert_to_tensor(gradient))
        self._num_calls.assign_add(1)

        def finish() -> Any:
            scale = 1.0 / self._passes if self._average else 1.0
            sums = [None if g is None else self._sums[id(v)] * scale for g, v in zip(gradients, variables, strict=True)]
            update(self._reduce(sums, variables, self.local), variables)
            for _, variable in known:
                self._sums[id(variable)].assign(tf.zeros_like(self._sums[id(variable)]))
            self._num_calls.assign(0)
            return tf.constant(True)

        def go_on() -> Any:
            optimizer._iterations.assign_add(1)
            return tf.constant(False)

        if tf.executing_eagerly():
            return finish() if int(self._num_calls) == self._passes else go_on()
        return tf.cond(tf.equal(self._num_calls, self._passes), finish, go_on)

    def reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the gradients of one call, reduced. ValueError if the step has several."""
        if self._passes != 1:
            raise ValueError(
                f"rank {rank()}: with backward_passes_per_step={self._passes} wrap the LossScaleOptimizer itself: "
                "hvd.DistributedOptimizer(LossScaleOptimizer(optimizer), backward_passes_per_step=…)"
            )
        shared = [variable for variable in variables if id(variable) not in self.local]
        return self._reduce(gradients, variables, self.local, functools.partial(self._check, shared))

    def _prepare(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Make the variables of this object, and of the optimizer, where a branch of a function could not."""
        if self._num_calls is None:
            self._num_calls = tf.Variable(0, dtype=tf.int32, trainable=False)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None and id(variable) not in self._sums:
                self._sums[id(variable)] = tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
        if not getattr(optimizer, "built", False) and hasattr(optimizer, "build"):
            optimizer.build(variables)
        elif hasattr(optimizer, "_create_all_weights"):  # optimizers of tf_keras.optimizers.legacy
            optimizer._create_all_weights(variables)
