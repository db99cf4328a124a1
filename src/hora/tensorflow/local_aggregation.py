"""Sums of the gradients of several backward passes, reduced over the ranks once: `backward_passes_per_step`.

Written with explicit dependencies, so that it means the same in eager mode, in a function and in a session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["LocalAggregation"]

Reduce = Callable[[list[Any], list[Any]], list[Any]]


class LocalAggregation:
    """Adds gradients up for `passes` calls, of which the last reduces and applies the sums.

    In the graph of a session the sums and the counter are local variables: they are neither saved nor broadcast, and
    `tf.compat.v1.local_variables_initializer` sets them to zero.
    """

    def __init__(self, reduce: Reduce, passes: int, average: bool) -> None:
        self.backward_passes_per_step, self.average_aggregated_gradients = passes, average
        self.counter: Any = None
        self._reduce = reduce
        self._sums: dict[int, Any] = {}
        self._graph: Any = None  # whose variables these are; None outside of sessions
        self._is_last: Any = None  # whether the gradients that were computed last complete a step

    def compute_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add gradients up; returns the reduced sums in every `passes`-th call, else the sums."""
        known = [i for i, gradient in enumerate(gradients) if gradient is not None]
        with tf.init_scope():
            self._make([variables[i] for i in known])
        sums = [self._sums[id(variables[i])] for i in known]
        new = [tf.convert_to_tensor(gradients[i]) for i in known]
        with tf.control_dependencies(new):
            added = [total.assign_add(gradient) for total, gradient in zip(sums, new, strict=True)]
            count = tf.identity(self.counter.assign_add(1))
        self._is_last = tf.equal(count, self.backward_passes_per_step)
        scale = 1.0 / self.backward_passes_per_step if self.average_aggregated_gradients else 1.0

        def reduce() -> list[Any]:
            scaled = [total.read_value() * tf.cast(scale, total.dtype) for total in sums]
            return self._reduce(scaled, [variables[i] for i in known])

        with tf.control_dependencies(added):
            results = tf.cond(self._is_last, reduce, lambda: [total.read_value() for total in sums])
        with tf.control_dependencies(results):
            renewed = tf.cond(self._is_last, lambda: self._renew(sums), lambda: tf.constant(False))
        with tf.control_dependencies([renewed]):
            outputs = dict(zip(known, [tf.identity(result) for result in results], strict=True))
        return [outputs.get(i) for i in range(len(gradients))]

    def apply_gradients(self, apply: Callable[[], Any], count: Callable[[], Any]) -> Any:
        """Call `apply` if the gradients that were computed last complete a step, else `count`."""
        assert self._is_last is not None

        def chosen(update: Callable[[], Any], answer: bool) -> Any:
            done = update()
            with tf.control_dependencies([] if done is None or tf.executing_eagerly() else [done]):
                return tf.constant(answer)

        return tf.cond(self._is_last, lambda: chosen(apply, True), lambda: chosen(count, False))

    @property
    def has_gradients(self) -> bool:
        return self._is_last is not None

    def _renew(self, sums: Sequence[Any]) -> Any:
        zeroed = [variable.assign(tf.zeros_like(variable)) for variable in [self.counter, *sums]]
        with tf.control_dependencies(zeroed):
            return tf.constant(True)

    def _make(self, variables: Sequence[Any]) -> None:
        """Make the counter and the sums that are missing, outside of any function."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if self.counter is None or graph is not self._graph:
            self._graph, self._sums = graph, {}
            self.counter = _zeros([], tf.int32, "hvd_counter")
        for variable in variables:
            if id(variable) not in self._sums:
                self._sums[id(variable)] = _zeros(variable.shape, variable.dtype, "hvd_sum")


def _zeros(shape: Any, dtype: Any, name: str) -> Any:
    v1, dtype = tf.compat.v1, tf.as_dtype(dtype).base_dtype
    if tf.executing_eagerly():
        return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)
    collections = [v1.GraphKeys.LOCAL_VARIABLES]
    return v1.Variable(tf.zeros(shape, dtype), trainable=False, use_resource=True, collections=collections, name=name)
