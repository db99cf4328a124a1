"""`DistributedOptimizer` for optimizers of `tf.compat.v1`, which programs with graphs and sessions use."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hora.tensorflow.gradients import Reduction, check_options
from hora.tensorflow.local_aggregation import LocalAggregation
from hora.torch.basics import rank

__all__ = ["GraphOptimizer"]

_V1Optimizer: Any = tf.compat.v1.train.Optimizer


class GraphOptimizer(_V1Optimizer):
    """Reduces gradients over the ranks when it computes them, and leaves the rest to the given optimizer."""

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, reduction: Reduction, passes: int, average: bool
    ) -> None:
        check_options(reduction.op, reduction.gradient_predivide_factor, passes)
        if isinstance(optimizer, GraphOptimizer):
            raise ValueError(
                f"rank {rank()}: {optimizer.get_name()} is a DistributedOptimizer already; wrap the plain optimizer, "
                "once"
            )
        if passes > 1 and tf.executing_eagerly():
            raise ValueError(
                f"backward_passes_per_step={passes} with an optimizer of tf.compat.v1 needs a graph; use one of "
                "tf.keras.optimizers in eager mode"
            )
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = reduction
        self._local: dict[int, Any] = {}
        self._agg_helper = None if passes == 1 else LocalAggregation(self._reduce, passes, average)

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of this variable out of the reduction."""
        self._local[id(variable)] = variable

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the given optimizer's gradients, reduced over the ranks, with their variables."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        with tf.name_scope(f"{self.get_name()}_Allreduce"):
            reduce = self._reduce if self._agg_helper is None else self._agg_helper.compute_gradients
            return list(zip(reduce(gradients, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply gradients that `compute_gradients` has returned; if they complete a step, else only count it."""
        pairs, helper = list(grads_and_vars), self._agg_helper
        if helper is None:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        if not helper.has_gradients:
            raise ValueError(
                f"rank {rank()}: with backward_passes_per_step={helper.backward_passes_per_step} gradients come from "
                f"compute_gradients() of {self.get_name()}; call it, or minimize(), before apply_gradients()"
            )
        with tf.control_dependencies([gradient for gradient, _ in pairs if gradient is not None]):
            done = helper.apply_gradients(
                lambda: self._optimizer.apply_gradients(pairs, global_step=global_step),
                lambda: None if global_step is None else global_step.assign_add(1),
            )
        return tf.group(done, name=name)

    def _reduce(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        return self._reduction(gradients, variables, self._local)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return a slot of the given optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the names of the given optimizer's slots."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the given optimizer."""
        return self._optimizer.variables(*args, **kwargs)
